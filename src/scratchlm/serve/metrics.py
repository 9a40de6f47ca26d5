"""`/metrics` in Prometheus' text format, under vLLM's names, so that its dashboards work."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from scratchlm.serve.engine_thread import News, Submission
from scratchlm.serve.service import Service

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FINISH = {"end": "stop", "stop": "stop", "length": "length"}


class Histogram:
    """Counts of times up to each of `SECONDS`."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(SECONDS, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Write it out; counts are of values up to a bound, so they add up."""
        so_far = 0
        for bound, count in zip((*SECONDS, "+Inf"), self.counts, strict=True):
            so_far += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {so_far}'
        yield f"{name}_sum{{{labels}}} {self.total}"
        yield f"{name}_count{{{labels}}} {so_far}"


class Metrics:
    """What is counted as news come; on the event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.first = Histogram()
        self.between = Histogram()
        self.whole = Histogram()
        self.finished: Counter[str] = Counter()
        self.num_prompt_tokens = self.num_generated = 0
        self._last: dict[tuple[Submission, int], float] = {}
        service.thread.listeners.append(self.take)

    def take(self, submission: Submission, news: News) -> None:
        """Count what came for one row."""
        if not submission.generates:
            self.num_prompt_tokens += submission.lengths[news.index] if news.is_over else 0
            return
        now, key, count = time.perf_counter(), (submission, news.index), len(news.pieces)
        self.num_generated += count
        before = self._last.pop(key, None)
        if count:
            if before is None:
                self.first.add(now - submission.begin)
                self.num_prompt_tokens += submission.lengths[news.index]
                if count > 1:  # the loop was behind: they came together
                    self.between.add(0.0, count - 1)
            else:
                self.between.add((now - before) / count, count)
        if not news.is_over:
            self._last[key] = now if count or before is None else before
            return
        self.whole.add(now - submission.begin)
        reason = news.pieces[-1].finish_reason if count else None
        self.finished["error" if news.error else FINISH.get(reason or "", "abort")] += 1

    def text(self) -> str:
        """Write everything in Prometheus' text format."""
        engine = self.service.engine
        scheduler, pool = engine.scheduler, engine.pool
        name = self.service.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'model_name="{name}"'
        running = len(scheduler.running)
        gauges = {
            "num_requests_running": running,
            "num_requests_waiting": max(self.service.thread.num_open - running, 0),
            "kv_cache_usage_perc": pool.num_held / pool.num_pages,
        }
        counters = {
            "prompt_tokens_total": self.num_prompt_tokens,
            "generation_tokens_total": self.num_generated,
            "num_preemptions_total": scheduler.num_put_back,
            "prefix_cache_queries_total": self.num_prompt_tokens,
            "prefix_cache_hits_total": scheduler.num_found,
        }
        histograms = {
            "time_to_first_token_seconds": self.first,
            "inter_token_latency_seconds": self.between,
            "e2e_request_latency_seconds": self.whole,
        }
        lines: list[str] = []
        for kind, table in (("gauge", gauges), ("counter", counters)):
            for key, value in table.items():
                lines += [f"# TYPE vllm:{key} {kind}", f"vllm:{key}{{{labels}}} {value}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason in ("stop", "length", "abort", "error"):
            count = self.finished[reason]
            lines.append(
                f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
            )
        for key, histogram in histograms.items():
            lines += [f"# TYPE vllm:{key} histogram", *histogram.lines(f"vllm:{key}", labels)]
        return "\n".join(lines) + "\n"


def routes(service: Service) -> list[BaseRoute]:
    """Return the route of the metrics."""
    kept = Metrics(service)

    async def metrics(request: Request) -> Response:
        return Response(kept.text(), media_type="text/plain; version=0.0.4")

    return [Route("/metrics", metrics, methods=["GET"])]
