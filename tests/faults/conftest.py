"""The standing suite's figures: each test records what it tried, the run ends with one table."""

import pytest


@pytest.fixture
def tried(record_property):
    """Record a row of the table that `make test` and `make test-slow` end with."""

    def record(what, count, note=""):
        record_property("reliability", [what, count, note])

    return record
