"""A trained model on disk: written so that a crash at any moment leaves only whole checkpoints.

    RUN/checkpoints/step-00000500/
        model.safetensors            the weights, under the names of the state dict
        training_state.safetensors   what else a run needs to go on (optional)
        config.json                  what the model is
        tokenizer.json               optional
        tokenizer_config.json        the chat template and its special tokens (optional)
        manifest.json                size and sha256 of every file, step, versions, metadata

Where several ranks wrote it, each has written `model-00001-of-00004.safetensors` with its pieces,
and the manifest says which they are; all readers put the tensors together, whatever the number.

A name `step-…` stands for a whole checkpoint or one damaged afterwards, which the hashes show.
Checkpoints are found by scanning; nothing points at a latest one. Nothing is pickled.
"""

from scratchlm.checkpoint.finding import (
    best_step,
    checkpoint_path,
    choose_checkpoint,
    find_checkpoints,
    is_checkpoint,
    newest_valid,
    read_chosen,
    step_of,
)
from scratchlm.checkpoint.manifest import (
    CONFIG,
    FORMAT_VERSION,
    MANIFEST,
    MODEL,
    SHARDED_VERSION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TRAINING_STATE,
    is_sharded,
    manifest_digest,
    read_manifest,
)
from scratchlm.checkpoint.pieces import DTYPES, Piece, StoredTensor
from scratchlm.checkpoint.reading import (
    TensorReader,
    iter_tensors,
    open_tensors,
    read_config,
    read_piece,
    read_tensors,
    stored_tensors,
    tensor_shapes,
    verify_checkpoint,
    weights_fingerprint,
)
from scratchlm.checkpoint.sharded import Exchange, write_sharded
from scratchlm.checkpoint.tidying import (
    clean_leftovers,
    prune_checkpoints,
    remove_damaged,
    set_aside_after,
)
from scratchlm.checkpoint.writing import write_checkpoint, write_tensors

__all__ = [
    "CONFIG",
    "DTYPES",
    "Exchange",
    "FORMAT_VERSION",
    "MANIFEST",
    "MODEL",
    "Piece",
    "SHARDED_VERSION",
    "StoredTensor",
    "TOKENIZER",
    "TOKENIZER_CONFIG",
    "TRAINING_STATE",
    "TensorReader",
    "best_step",
    "checkpoint_path",
    "choose_checkpoint",
    "clean_leftovers",
    "find_checkpoints",
    "is_checkpoint",
    "is_sharded",
    "iter_tensors",
    "manifest_digest",
    "newest_valid",
    "open_tensors",
    "prune_checkpoints",
    "read_chosen",
    "read_config",
    "read_manifest",
    "read_piece",
    "read_tensors",
    "remove_damaged",
    "set_aside_after",
    "step_of",
    "stored_tensors",
    "tensor_shapes",
    "verify_checkpoint",
    "weights_fingerprint",
    "write_checkpoint",
    "write_sharded",
    "write_tensors",
]
