"""Reading traces: formats, what is kept of a request, and lines that are wrong."""

import gzip
import io
import json

import pytest
from simulate_samples import lines_of

from kvcore.testing.traces import CONVERSATION, TOOL_AGENT, synthetic_trace
from kvcore_bench.simulate import trace as traces
from kvcore_bench.simulate.trace import TraceError, read_trace


def request(tokens, ids, **more):
    return {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids, **more}


@pytest.fixture
def read(tmp_path):
    def read(records, **options):
        path = tmp_path / "t.jsonl"
        path.write_text(records if isinstance(records, str) else lines_of(records))
        return read_trace(str(path), **options)

    return read


def prompts(trace):
    return [list(blocks) for _, blocks in trace.requests()]


def test_mooncake(read):
    trace = read([request(1100, [0, 1, 2]), request(1024, [0, 3], timestamp=2500), request(100, [9])])
    assert (trace.format, trace.block_tokens, trace.unlike) == ("Mooncake", 512, 0)
    assert prompts(trace) == [[0, 1], [0, 2], []]  # parts of blocks are left out
    assert (trace.distinct, trace.input_tokens) == (3, 2224)
    assert list(trace.times_s) == [0, 2.5, 2.5]  # time does not run back


def test_bailian(read):
    """Its ids name a block's tokens alone: the same after others is another block, which no prefix cache would hit."""
    trace = read([request(48, [1, 2, 1], chat_id=5, timestamp=1.5), request(32, [2, 1], chat_id=6, timestamp=3)])
    assert (trace.format, trace.block_tokens) == ("Bailian", 16)
    assert prompts(trace) == [[0, 1, 2], [3, 4]]
    assert list(trace.times_s) == [1.5, 3]


def test_ids_may_be_texts_and_times_may_lack(read):
    trace = read([{"input_length": 1024, "hash_ids": ["f00d", "beef"]}, request(512, ["f00d"])])
    assert prompts(trace) == [[0, 1], [0]]


def test_packed_and_standard_input(tmp_path, monkeypatch):
    text = lines_of(synthetic_trace(TOOL_AGENT, 50)).encode()
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "t.jsonl").write_bytes(text)
    plain, packed = (read_trace(str(tmp_path / name)) for name in ("t.jsonl", "t.jsonl.gz"))
    for sent in (text, gzip.compress(text)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(sent))))
        assert prompts(read_trace("-")) == prompts(packed) == prompts(plain)


def test_only_the_first_requests(read):
    assert len(read([request(512, [i]) for i in range(9)] + ["wrong"], limit=9).ends) == 9


WRONG = {
    "not json": ("{nonsense", "JSON is malformed"),
    "no object": ("[1, 2]", "Expected `object`, got `array`"),
    "no length": ('{"hash_ids": [1]}', "missing required field `input_length`"),
    "no ids": ('{"input_length": 5}', "missing required field `hash_ids`"),
    "length": ('{"input_length": "5", "hash_ids": []}', "Expected `int`, got `str` - at `$.input_length`"),
    "negative": ('{"input_length": -5, "hash_ids": []}', "Expected `int` >= 0 - at `$.input_length`"),
    "id": ('{"input_length": 5, "hash_ids": [null]}', "got `null` - at `$.hash_ids[0]`"),
    "time": ('{"input_length": 5, "hash_ids": [], "timestamp": 1e999}', "Number out of range"),
    "cut": ('{"input_length": 5, "hash_ids": [1, 2', "Input data was truncated"),
    "bytes": ('{"input_length": 5, "hash_ids": ["\udcff"]}', "Invalid UTF-8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named_with_what_is_expected(case, tmp_path):
    line, text = WRONG[case]
    path = tmp_path / "bad.jsonl"
    path.write_bytes((lines_of([request(512, [1])]) + "\n" + line + "\n").encode(errors="surrogateescape"))
    with pytest.raises(TraceError) as error:
        read_trace(str(path))
    assert str(error.value).startswith("bad.jsonl, line 3: ")
    assert text in str(error.value)
    assert "expected one JSON object a line with input_length" in str(error.value)


def test_a_file_without_end_of_line_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(9 << 20)))
    with pytest.raises(TraceError, match="line 1: it is longer than 1 MiB"):
        read_trace(str(path))


def test_a_damaged_archive(tmp_path):
    whole = gzip.compress(lines_of(synthetic_trace(CONVERSATION, 200)).encode())
    path = tmp_path / "bad.jsonl.gz"
    for damaged in (whole[: len(whole) // 2], whole[:500] + bytes(50) + whole[550:]):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"bad.jsonl.gz(, line| is damaged after line) \d+"):
            read_trace(str(path))


def test_nothing_to_simulate(read):
    for text in ("", "\n\n"):
        with pytest.raises(TraceError, match="holds no request: expected one JSON object a line"):
            read(text)
    with pytest.raises(TraceError, match=r"no prompt is as long as one block of 512 tokens.*--block-tokens"):
        read([request(100, [1])])


def test_another_size_of_blocks_is_suspected(read):
    trace = read([request(640, list(range(10))), request(64, [0])])
    assert (trace.unlike, trace.likely_block_tokens) == (1, 64)
    assert read([request(640, list(range(10)))], block_tokens=64).unlike == 0


def test_synthetic_traces_are_the_same_for_a_seed_and_look_like_public_ones():
    assert json.dumps(list(synthetic_trace(TOOL_AGENT, 50))) == json.dumps(list(synthetic_trace(TOOL_AGENT, 50)))
    assert next(synthetic_trace(TOOL_AGENT, 1)) != next(synthetic_trace(TOOL_AGENT, 1, seed=1))
    for record in synthetic_trace(CONVERSATION, 200):
        assert list(record) == ["timestamp", "input_length", "output_length", "hash_ids"]
        assert len(record["hash_ids"]) == -(-record["input_length"] // 512)
