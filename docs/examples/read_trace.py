"""Reading a trace: hits and misses of a pipeline, and how busy each rank was."""

# %% A traced run on a simulated cluster: eight stages, SpecPipe's testbed
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from specdec.cli.main import main

folder = Path(tempfile.mkdtemp()) / "run"
status = main(
    [
        "run",
        *("strategy=specpipe", "policy.width=8", "executor.stages=8"),
        *("clock=simulated", "clock.profile=specpipe_8x3090", "trace=true"),
        *("data=stdlib", "data.limit=1", "max_new_tokens=32", f"output_dir={folder}"),
    ]
)
assert status == 0

# %% trees.json: the decisions of every step
trees = json.loads((folder / "trees.json").read_text())
steps = [step for request in trees["requests"] for step in request["steps"]]
kinds = Counter(step["commit"]["kind"] for step in steps if step["commit"])
fed = [len(step["submitted"]) for step in steps]
print(f"{len(steps)} steps: {kinds['hit']} hits, {kinds['miss']} misses")
print(f"{sum(fed)} nodes fed, {max(fed)} at most in one step")

# %% trace.json: the spans of every rank (the format of ui.perfetto.dev)
events = json.loads((folder / "trace.json").read_text())["traceEvents"]
names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
busy: dict[int, float] = defaultdict(float)
end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
for event in events:
    if event["ph"] == "X" and event["cat"] != "wait":
        busy[event["tid"]] += event["dur"]
for rank, name in sorted(names.items()):
    print(f"{name:28} busy {busy[rank] / end:5.1%} of {end / 1e6:.2f} s")
