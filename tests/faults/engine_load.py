"""Submit to engines, step and cancel at random, for a time: no answer changes, no page is lost.

    python tests/faults/engine_load.py SECONDS

The last line printed is a JSON summary: operations, and how much the process grew after the first
fifth.
"""

import gc
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from inference.test_engine import operate_at_random
from serve.tiny_server import memory


def main(seconds: float) -> None:
    began, operations, before = time.monotonic(), 0, None
    while (now := time.monotonic() - began) < seconds or before is None:
        operate_at_random(random.Random(operations), 500)
        operations += 500
        if before is None and now >= seconds / 5:
            gc.collect()
            before = memory()
    gc.collect()
    print(json.dumps({"operations": operations, "grown_mb": round(memory() - before, 1)}))


if __name__ == "__main__":
    main(float(sys.argv[1]))
