"""Known mistakes are named, two at once are never called one, right files are left alone."""

import ast
from itertools import combinations

import pytest

from check.labelled import FROM_MUTATIONS, HEAD, LEARNERS
from check.labelled_others import OTHERS
from check.right import RIGHT
from mutations import MUTATIONS
from scratchlm.check import TASKS, check_file, find_task
from scratchlm.check.mistakes import MISTAKES, also_right, outcomes_of
from scratchlm.check.outcomes import MATCHING, agree
from scratchlm.check.tasks import expected

# Of tests/mutations.py, what no function of a learner can have: experts, router, cache, documents;
# and SwiGLU twice, once as a module.
ELSEWHERE = {
    "experts take each other's rows",
    "top-k is discarded",
    "router weights not renormalised",
    "cache forgets to advance",
    "documents see each other",
    "the formula of SwiGLU gates the other branch",
}
LABELLED = [
    *(
        (learner.task, edit[0], learner.wrong(edit))
        for learner in LEARNERS
        for edit in learner.edits
    ),
    *OTHERS,
]


def names_in(source):
    """Return what a source defines at its top level."""
    tops = ast.parse(source).body
    targets = [target for top in tops for target in getattr(top, "targets", [])]
    names = {getattr(one, "name", getattr(one, "id", None)) for one in (*tops, *targets)}
    return names - {None}


@pytest.fixture
def verdicts(tmp_path):
    """Check pairs of a task and a source; those that share no name share a file and a process.

    A function that is wrong is borrowed by those after it, so that each is judged by itself.
    """

    def check(pairs):
        files, found = [], {}
        for at, (task, source) in enumerate(pairs):
            names = names_in(source)
            file = next((file for file in files if not file["names"] & names), None)
            if file is None:
                files.append(file := {"names": set(), "at": {}, "sources": []})
            file["names"] |= names
            file["at"][find_task(task).name] = at
            file["sources"].append(source)
        for i, file in enumerate(files):
            path = tmp_path / f"my_ops_{i}.py"
            path.write_text(HEAD + "\n".join(file["sources"]), encoding="utf-8")
            for one in check_file(path, [task for task in TASKS if task.name in file["at"]]):
                found[file["at"][one.task.name]] = one
        return [found[at] for at in range(len(pairs))]

    return check


def test_every_function_has_a_learner():
    assert [learner.task for learner in LEARNERS] == [task.short for task in TASKS]


def test_the_labelled_set_holds_the_mutations_and_many_more():
    assert FROM_MUTATIONS.keys() | ELSEWHERE == MUTATIONS.keys()
    names = {(task, name) for task, name, _ in LABELLED}
    assert set(FROM_MUTATIONS.values()) <= names
    assert len(names) >= len(FROM_MUTATIONS) + 25


def test_known_mistakes_are_named(verdicts):
    wrong = []
    judged = verdicts([(task, source) for task, _, source in LABELLED])
    for (task, name, _), found in zip(LABELLED, judged, strict=True):
        assert found.state == "wrong", (task, name)
        if found.mistake is None or found.mistake.name != name:
            wrong.append((task, name, found.mistake and found.mistake.name))
    assert len(wrong) <= 0.05 * len(LABELLED), wrong
    assert not {(task, name) for task, name, _ in wrong} & set(FROM_MUTATIONS.values())


def called_one(learners, verdicts, step=1):
    """Return the pairs of mistakes that are given one name or none at all, and how many there are.

    Where one edit undoes the other (`hidden`) there is one mistake in the file, not two.
    """
    pairs = [
        ((learner.task, first[0], second[0]), source)
        for learner in learners
        for (i, first), (j, second) in list(combinations(enumerate(learner.edits), 2))[::step]
        if (i, j) not in learner.hidden
        and (source := learner.wrong(first, second) or learner.wrong(second, first)) is not None
    ]
    judged = verdicts([(names[0], source) for names, source in pairs])
    found = [
        (*names, seen.mistake and seen.mistake.name)
        for (names, _), seen in zip(pairs, judged, strict=True)
        if seen.state != "wrong" or (seen.mistake and not seen.mistake.double)
    ]
    return found, len(pairs)


def test_two_mistakes_are_never_called_one(verdicts):
    """A seventh of all pairs; `test_no_pair_at_all_is_called_one` takes every one."""
    wrong, count = called_one(LEARNERS, verdicts, step=7)
    assert wrong == []
    assert count >= 70


@pytest.mark.slow
@pytest.mark.parametrize("learner", LEARNERS, ids=lambda learner: learner.task)
def test_no_pair_at_all_is_called_one(learner, verdicts):
    assert called_one([learner], verdicts)[0] == []


def test_right_files_raise_no_alarm(verdicts):
    right = [*((learner.task, learner.source) for learner in LEARNERS), *RIGHT]
    alarms = [
        (task, source, found.first)
        for (task, source), found in zip(right, verdicts(right), strict=True)
        if found.state != "right"
    ]
    assert alarms == []


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.short)
def test_known_mistakes_leave_the_definition_and_each_other(task):
    right = [expected(task.name), *also_right(task.name)]
    known = [(m, form) for m in MISTAKES[task.name] for form in outcomes_of(m)]
    assert len({m.name for m, _ in known}) >= 3

    def same(one, other, times):
        return all(agree(a, b, times) for a, b in zip(one, other, strict=True))

    for mistake, form in known:
        assert not any(same(form, other, 1.0) for other in right), mistake.name
        for other, wrong in known:
            if mistake.name < other.name and not (mistake.double or other.double):
                assert not same(form, wrong, MATCHING), (mistake.name, other.name)


def test_hints_are_three_and_the_name_gives_none_away():
    for mistakes in MISTAKES.values():
        for mistake in mistakes:
            assert len(mistake.hints) == 3
            assert all(mistake.hints)


def test_a_mistake_below_is_not_blamed_on_those_above(tmp_path):
    """A wrong softmax is borrowed by attention, so that attention is judged by itself."""
    path = tmp_path / "my_ops.py"
    path.write_text(
        HEAD
        + """
def run_softmax(x, dim):
    return x.exp() / x.exp().sum(dim, keepdim=True)
def run_scaled_dot_product_attention(Q, K, V, mask=None):
    scores = Q @ K.mT / Q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return run_softmax(scores, -1) @ V
"""
    )
    softmax, attention = check_file(path, [find_task("softmax"), find_task("attention")])
    assert softmax.state == "wrong"
    assert attention.state == "right"


def test_an_unknown_mistake_shows_the_smallest_example_and_the_first_wrong_cell(verdicts):
    source = "def run_silu(x):\n    return x * torch.sigmoid(x) + (x > 2)"
    (found,) = verdicts([("silu", source)])
    assert found.mistake is None
    assert found.case.name == "five numbers"
    assert found.first.text == "[4] got 3.85772, expected 2.85772 (1 of 5 wrong)"
    assert found.example == "in_features=[-2.0, -0.5, 0.0, 1.0, 3.0]"
