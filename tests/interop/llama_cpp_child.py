"""llama.cpp in a process of its own, which it may end: python llama_cpp_child.py WHEEL < jobs.

A job is a JSON object on a line: `model`, and `prompt` (ids) with `steps`, or `texts` and
`special`. The answer to a prompt is the greedy continuation and, for each of its steps, the log
probabilities of all tokens; to texts, the ids of each. Everything is computed in float32.
"""

import json
import math
import sys
import urllib.request


class Cyllama:
    """The library itself, through cyllama."""

    def __init__(self, path):
        import cyllama.llama.llama_cpp as llama

        llama.disable_logging()
        llama.ggml_backend_load_all()

        class Model(llama.LlamaModel):
            @property
            def n_vocab(self):  # which the wheel's get_logits asks for, and it has not
                return self.get_vocab().n_vocab

        self.llama, self.model = llama, Model(path)
        self.vocab = self.model.get_vocab()

    def tokenize(self, text, special):
        return list(self.vocab.tokenize(text, False, special))

    def generate(self, prompt, steps):
        params = self.llama.LlamaContextParams()
        params.n_ctx = params.n_batch = params.n_ubatch = 64
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0  # float32
        params.flash_attn_type = 0
        context = self.llama.LlamaContext(self.model, params)
        tokens, rows = [], []
        ids, at = list(prompt), 0
        for _ in range(steps):
            batch = self.llama.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
            for n, token in enumerate(ids):
                batch.add(token, at + n, [0], n == len(ids) - 1)
            context.decode(batch)
            at += len(ids)
            rows.append(log_softmax(list(context.get_logits())))
            ids = [max(range(len(rows[-1])), key=rows[-1].__getitem__)]
            tokens += ids
        text = "".join(self.vocab.token_to_piece(token, 0, False) for token in tokens)
        return {"tokens": tokens, "logprobs": rows, "text": text}


class Xllamacpp:
    """llama.cpp's server, through xllamacpp."""

    def __init__(self, path):
        import xllamacpp as llama

        params = llama.CommonParams()
        params.model.path = path
        params.n_ctx = params.n_batch = params.n_ubatch = 64
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_parallel, params.warmup, params.verbosity, params.port = 1, False, 0, 0
        self.server = llama.Server(params)

    def post(self, path, data):
        request = urllib.request.Request(
            self.server.listening_address + path,
            json.dumps(data).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def tokenize(self, text, special):
        asked = {"content": text, "add_special": False, "parse_special": special}
        return self.post("/tokenize", asked)["tokens"]

    def generate(self, prompt, steps):
        asked = {"prompt": prompt, "n_predict": steps, "temperature": 0, "n_probs": 100_000}
        answer = self.post("/completion", {**asked, "cache_prompt": False, "return_tokens": True})
        rows = []
        for step in answer["completion_probabilities"]:
            row = {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}
            # log_softmax again: the server adds the probabilities up in float32
            rows.append(log_softmax([row[token] for token in range(len(row))]))
        return {"tokens": answer["tokens"], "logprobs": rows, "text": answer["content"]}


def log_softmax(logits):
    top = max(logits)
    total = top + math.log(sum(math.exp(value - top) for value in logits))
    return [value - total for value in logits]


def main(wheel):
    kinds = {"cyllama": Cyllama, "xllamacpp": Xllamacpp}
    for line in sys.stdin:
        job = json.loads(line)
        model = kinds[wheel](job["model"])
        if "texts" in job:
            answer = [model.tokenize(text, job["special"]) for text in job["texts"]]
        else:
            answer = model.generate(job["prompt"], job["steps"])
        print(f"ANSWER {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
