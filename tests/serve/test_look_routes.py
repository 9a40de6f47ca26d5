"""The routes of the views over HTTP: what they refuse, and that nothing makes them fail."""

import random
import threading

import pytest

from inference.tiny import tiny_model
from scratchlm.serve.look_routes import views
from scratchlm.serve.subject import Subject
from serve.tiny_server import ask, tiny_engine, tiny_loaded, tiny_server

IDS = [*b"ab ab abc"]


@pytest.fixture(scope="module")
def server():
    with tiny_server() as running:
        yield running


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("read", {}, "ids: is required"),
        ("read", {"ids": []}, "at least one token"),
        ("read", {"ids": [10**6]}, "ids: must hold token ids in [0, 259)"),
        ("read", {"ids": IDS, "fast": True}, "unknown field 'fast'"),
        ("read", {"ids": [1] * 513}, "ids: must be at most 512 token ids"),
        ("choices", {"ids": IDS, "at": 0}, "at must lie in [1, 9]"),
        ("choices", {"ids": IDS, "at": 2, "sampling": {"heat": 1}}, "sampling: has no 'heat'"),
        ("choices", {"ids": IDS, "at": 2, "sampling": {"top_p": 2}}, "sampling: top_p"),
        ("attention", {"ids": IDS, "layer": 2, "head": 0, "query": 0}, "layer: must be"),
        ("attention", {"ids": IDS, "layer": 0, "head": 0, "query": 9}, "query must lie in [0, 9)"),
        ("ablate", {"ids": IDS, "edits": [{"point": "layers.9.out", "factor": 0}]}, "no point"),
        ("patch", {"ids": IDS, "other": [1], "token": 3}, "as many tokens; got 9 and 1"),
        ("number", {"ids": IDS, "kind": "luck"}, "kind: must be one of probability"),
        ("number", {"ids": IDS, "kind": "logit"}, "kind: "),
        ("cost", {"at": 3, "machine": "abacus"}, "unknown GPU 'abacus'"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line_that_names_it(server, name, body, says):
    answer = ask(server, f"/look/{name}", body)
    assert answer.status == 400
    assert says in answer.error["message"]
    assert "\n" not in answer.error["message"]


def test_what_a_view_would_hold_is_bounded(monkeypatch):
    """Logits of a text and weights of a layer grow with its length; patching by its square."""
    monkeypatch.setattr("scratchlm.serve.look_routes._NUMBERS", 40_000)  # 4 heads × 100²
    monkeypatch.setattr("scratchlm.serve.look_routes._PATCHED", 800)  # 2 layers × 20²
    with tiny_server() as server:
        assert ask(server, "/look/read", {"ids": [1] * 100}).status == 200
        refused = ask(server, "/look/heads", {"ids": [1] * 101})
        assert (refused.status, refused.error["param"]) == (400, "ids")
        for count, status in ((20, 200), (21, 400)):
            body = {"ids": [1] * count, "other": [2] * count, "token": 3}
            assert ask(server, "/look/patch", body).status == status


def test_no_body_makes_a_view_fail(server):
    """Random bodies of the known fields, half of them right: never a 5xx."""
    service = server.service
    tables = views(service, Subject.of(service.loaded.model, service.loaded.tokenizer, "x"))
    rng = random.Random(0)
    odd = [None, -1, 0, 1, 3, 9, 10**30, 0.5, 1e308, "", "a", "heads", True, [], [1, 2], {}, [None]]
    odd += [[{"point": "layers.0.out", "factor": 1e3, "units": [1, "a"]}], {"top_k": 10**30}]
    seen = {}
    for _ in range(400):
        name = rng.choice(list(tables))
        body = {field: rng.choice(odd) for field in tables[name].table if rng.random() < 0.5}
        body |= {"ids": IDS} if "ids" in tables[name].table and rng.random() < 0.9 else {}
        for field in ("token", "at", "layer", "head", "query"):
            if field in tables[name].table and rng.random() < 0.8:
                body[field] = rng.randrange(3)
        answer = ask(server, f"/look/{name}", body)
        assert answer.status in (200, 400), (name, body, answer.body)
        seen.setdefault(answer.status, set()).add(name)
    assert len(seen[200]) >= 6
    assert len(seen[400]) >= 10


def test_the_page_and_its_views_need_the_key(server):
    assert ask(server, "/").status == 200
    with tiny_server(api_key="secret") as guarded:
        for path, body in (("/", None), ("/page/main.js", None), ("/look/read", {"ids": IDS})):
            assert ask(guarded, path, body).status == 401
            headers = {"Authorization": "Basic OnNlY3JldA=="}  # what a browser asks for
            assert ask(guarded, path, body, headers=headers).status == 200


def test_views_among_answers_change_no_bit_of_them():
    """Edits run beside the engine on the same weights; its answers stay as they were."""
    loaded = tiny_loaded()
    body = {"prompt": IDS, "max_tokens": 24, "seed": 3, "logprobs": 0, "temperature": 1}
    edits = [{"point": f"layers.{i}.attn.out", "factor": 0} for i in (0, 1)]
    with tiny_server(loaded, tiny_engine(loaded)) as server:
        alone = ask(server, "/v1/completions", body).json["choices"]
        changed = []

        def look():
            for _ in range(12):
                found = ask(server, "/look/ablate", {"ids": IDS, "edits": edits}).json
                changed.append(found["same_bits"])

        thread = threading.Thread(target=look)
        thread.start()
        among = [ask(server, "/v1/completions", body).json["choices"] for _ in range(6)]
        thread.join()
    assert among == [alone] * 6
    assert changed == [False] * 12
    assert tiny_model(259, 512) is loaded.model
