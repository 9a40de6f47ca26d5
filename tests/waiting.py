"""Wait for an event, however slow the machine: the limit is only so that a test ends."""

import time

PATIENCE = 600.0  # seconds


def wait_until(true, pause=0.002):
    """Wait for something that must come."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(pause)
