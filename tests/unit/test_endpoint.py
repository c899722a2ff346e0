"""A server as a row: requests, streams, times, counts and refusals, over HTTP on this machine.

The server is a small one of our own; what it decodes is a fixed sequence of the bundled target's
tokens, cut into chunks as servers cut them.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from specdec.config.job import run_job_of
from specdec.errors import UserError
from specdec.metrics.rates import summarise
from specdec.pairs import PretrainedPair
from specdec.rivals.endpoint import Endpoint, EndpointOptions
from specdec.runs.rival import baseline_of_endpoint
from specdec.runs.runners import TokenPrompt
from specdec.state import StopRules

pytestmark = pytest.mark.slow

EOS = 0
TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height"
GAP_S = 0.02  # between chunks
METRICS = """# HELP vllm:spec_decode_num_drafts_total n
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {proposed}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0"}} 99
"""


class Server(ThreadingHTTPServer):
    """Streams ``tokens`` in chunks of ``sizes``; what it was asked is in ``bodies``."""

    def __init__(self, tokenizer, tokens, sizes, **options):
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokenizer, self.tokens, self.sizes, self.bodies = tokenizer, tokens, sizes, []
        self.metrics = options.get("metrics", False)
        self.timings = options.get("timings")
        self.miscount = options.get("miscount", 0)
        self.reason = options.get("reason", "stop" if tokens[-1] == EOS else "length")
        self.num_requests = 0
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def chunks(self, wants_ids):
        start, sent = 0, ""
        for size in self.sizes:
            part = self.tokens[: start + size]
            text = self.tokenizer.decode(part, skip_special_tokens=True)
            choice = {"index": 0, "text": text[len(sent) :]}
            if wants_ids:
                choice["token_ids"] = part[start:]
            yield {"choices": [choice]}
            start, sent = start + size, text
        yield {"choices": [{"text": "", "finish_reason": self.reason}]}
        end = {"choices": [], "usage": {"completion_tokens": len(self.tokens) + self.miscount}}
        yield end | ({"timings": self.timings} if self.timings else {})


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        """Quiet."""

    def do_GET(self):
        server = self.server
        if self.path == "/v1/models":
            self._reply(json.dumps({"data": [{"id": "tiny"}]}))
        elif self.path == "/metrics" and server.metrics:
            n = 10 + server.num_requests  # it has served others before
            self._reply(METRICS.format(drafts=3 * n, proposed=12 * n, accepted=4 * n))
        else:
            self.send_error(404)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.bodies.append((self.path, self.headers.get("Authorization"), body))
        if body["model"] != "tiny":
            self.send_error(400, "no such model")
            return
        self.send_response(200)
        self.end_headers()
        for message in server.chunks("return_token_ids" in body):
            time.sleep(GAP_S)
            self.wfile.write(f": keep\n\ndata: {json.dumps(message)}\n\n".encode())
            self.wfile.flush()
        server.num_requests += 1
        self.wfile.write(b"data: [DONE]\n\n")

    def _reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture(scope="module")
def tokenizer():
    return PretrainedPair(target="bundled:target", draft="bundled:draft").tokenizer


@pytest.fixture
def serve(tokenizer):
    servers = []

    def start(sizes=(1, 3, 2, 1), eos=True, **options):
        ids = tokenizer(TEXT)["input_ids"]
        prompt, tokens = ids[:8], ids[8 : 8 + sum(sizes) - eos] + [EOS] * eos
        servers.append(Server(tokenizer, tokens, sizes, **options))
        return servers[-1], prompt, tokens

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _generate(server, prompt_ids, tokenizer, sampling=None, **options):
    endpoint = Endpoint(
        EndpointOptions(base_url=server.url, **options), tokenizer=tokenizer, eos_ids={EOS}
    )
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 5}
    return endpoint.generate(prompt_ids, max_new_tokens=7, sampling=sampling or greedy)


@pytest.mark.parametrize("form", ["ids", "text"])
@pytest.mark.parametrize("eos", [True, False])
def test_tokens_and_times(serve, tokenizer, form, eos):
    """The server's own tokens, each at the time of its chunk, whichever form they are sent in."""
    sizes = (1, 3, 2, 1)
    server, prompt, tokens = serve(sizes, eos=eos)
    found = _generate(server, prompt, tokenizer, prompt=form)
    assert list(found.tokens) == tokens
    assert np.all(np.diff(found.times_s) >= 0)
    chunk_of = np.repeat(np.arange(len(sizes)), sizes)
    for token in range(1, len(tokens) - eos):  # the text leaves the end token out
        apart = found.times_s[token] - found.times_s[token - 1]
        assert (apart > 0) == (chunk_of[token] > chunk_of[token - 1])
    assert found.wall_s >= GAP_S * len(sizes)
    assert found.rounds == len(sizes) - (eos and form == "text")  # an empty chunk is no pass
    ((path, key, body),) = server.bodies
    assert path == "/v1/completions"
    assert key is None
    assert body["prompt"] == (prompt if form == "ids" else tokenizer.decode(prompt))
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (7, 0.0, True)


@pytest.mark.parametrize(
    "options", [{"metrics": True}, {"timings": {"draft_n": 12, "draft_n_accepted": 4}}]
)
def test_acceptance_is_the_servers(serve, tokenizer, options):
    """Counts are those of this request alone: of vLLM's counters, the increase."""
    server, prompt, tokens = serve(**options)
    for _ in range(2):
        found = _generate(server, prompt, tokenizer, prompt="ids")
        assert (found.proposed, found.accepted) == (12, 4)
        assert found.rounds == len(tokens) - 4


def test_a_row(serve, tokenizer):
    """Totals pass the checks of all rates."""
    server, prompt, tokens = serve(metrics=True)
    pair = PretrainedPair(target="bundled:target", draft="bundled:draft")
    words = ["strategy=endpoint", f"strategy.options.base_url={server.url}", "data=stdlib"]
    cfg = run_job_of(words).config
    stop = StopRules(max_new_tokens=7, eos_ids=frozenset({EOS}))
    baseline = baseline_of_endpoint(cfg, pair, stop)
    results = []
    totals = baseline.run([TokenPrompt(3, np.array(prompt))], results.append)
    baseline.close()
    assert list(results[0].output) == tokens
    summary = summarise(results, totals)
    assert summary["acceptance_length"] == pytest.approx(len(tokens) / (len(tokens) - 4))
    assert summary["proposed_nodes"] == 12


def test_refusals(serve, tokenizer):
    server, prompt, _ = serve()
    with pytest.raises(UserError, match=r"no models are listed at http://127\.0\.0\.1:9/v1/models"):
        Endpoint(EndpointOptions(base_url="http://127.0.0.1:9/v1"), tokenizer=tokenizer, eos_ids=())
    with pytest.raises(UserError, match=r"another failed: .*no such model"):
        _generate(server, prompt, tokenizer, model="another")
    split = [*prompt[:4], *tokenizer("de")["input_ids"], *tokenizer("f")["input_ids"]]
    with pytest.raises(UserError, match="does not encode to its token ids again"):
        _generate(server, split, tokenizer)
    # One token more than the text is an end token only where the server says that it stopped.
    for options in ({"miscount": 3}, {"miscount": -2}, {"eos": True, "reason": "length"}):
        server, prompt, tokens = serve(**options)
        counted = len(tokens) + options.get("miscount", 0)
        with pytest.raises(UserError, match=f"counts {counted} tokens of a text that encodes"):
            _generate(server, prompt, tokenizer)
