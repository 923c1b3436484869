"""What a streamed token costs the event loop in JSON: counted, since times are bench/output_path.py's to measure."""

from __future__ import annotations

from server_fakes import FakeEngine

from aengine.server.chat_frames import ChatFrames, ChunkOptions
from aengine.server.completion_frames import CompletionFrames, CompletionOptions
from aengine.server.jobs import Job, JobHead
from aengine.types import OutputDelta, SamplingParams
from tests.counting import calls


def cost(frames):
    """Calls that a delta makes, once the first has been."""
    delta = OutputDelta(0, " tokens", (5,))
    frames.delta(delta)
    return calls(lambda: [frames.delta(delta) for _ in range(100)]) / 100


def test_a_content_chunk_is_made_in_a_few_calls():
    engine = FakeEngine()
    stream = engine.submit([1], SamplingParams(), request_id="r")
    job = Job(JobHead("chatcmpl-1", 1, "m", "fp"), [stream], 1)
    assert cost(ChatFrames(job, ChunkOptions(usage=True), engine.text)) < 5
    assert cost(CompletionFrames(job, CompletionOptions(ChunkOptions()), engine.text)) < 5
