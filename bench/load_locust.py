"""The same as bench/load.py, asked by locust: a load generator that others know.

    python bench/load_locust.py URL PATH < work.json

Every user of `work.json` is a locust user with a `requests` session; times are taken where the
bytes of an answer arrive. Needs `pip install locust`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

import gevent
from locust import HttpUser, constant, task
from locust.env import Environment
from locust.exception import StopUser

from load import LoadError, Seen, report, seen


def all_users(url: str, users: list[list[dict[str, Any]]], path: str) -> list[Seen]:
    """Let every user ask one thing after the other, all users at once."""
    waiting, found = deque(users), list[Seen]()

    class Asker(HttpUser):  # type: ignore[misc]
        wait_time = constant(0)

        def on_start(self) -> None:
            self.bodies = deque(waiting.popleft())

        @task  # type: ignore[misc]
        def ask(self) -> None:
            if not self.bodies:
                raise StopUser
            began = time.monotonic()
            answer = self.client.post(path, json=self.bodies.popleft(), stream=True)
            came = [(time.monotonic(), data) for data in answer.iter_content(None)]
            found.append(seen(came, began))

    environment = Environment(user_classes=[Asker], host=url)
    runner = environment.create_local_runner()
    runner.start(len(users), spawn_rate=len(users))
    while len(found) < sum(map(len, users)):
        if environment.stats.total.num_failures or runner.errors:
            raise LoadError(f"{[*environment.stats.errors.values(), *runner.errors]}")
        gevent.sleep(0.01)
    runner.quit()
    return found


if __name__ == "__main__":
    report(lambda: all_users(sys.argv[1], json.load(sys.stdin), sys.argv[2]))
