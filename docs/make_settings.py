"""Write docs/settings.md: every key of a run's config."""

from pathlib import Path

from scratchlm.cli.settings_help import Key, data_keys, model_keys, train_keys

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

Every key of `config.toml`, and of the command line: `scratchlm train my.txt train.lr=1e-3`. \
`scratchlm config --train`, `--model` and `--data` print the same. "As suits": chosen by the data \
and the machine, and written into the run's `config.toml`. Made by docs/make_settings.py from the \
code.
"""


def table(title: str, keys: list[Key]) -> str:
    """Write the keys of a section as a table."""
    rows = [f"| `{key.name}` | {key.kind} | {key.default} | {key.meaning} |" for key in keys]
    head = [f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def page() -> str:
    """Return the page."""
    parts = (("train", train_keys()), ("model", model_keys()), ("data", data_keys()))
    return "\n\n".join([HEAD.strip(), *(table(title, keys) for title, keys in parts)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
