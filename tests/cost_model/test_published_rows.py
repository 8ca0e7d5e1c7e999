"""A few published runs, priced through the real capture. The facts are those of the named tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

BASE: dict[str, Any] = {
    "tier": "A", "cp": 1, "ep": 1, "vpp": 1, "zero": 0, "zero_shard_gpus": None, "overlap": None, "net": None,
    "gpus_per_node": 8, "uncertain": [], "peak_mem_gib": None, "mem_kind": None, "oom": None, "extra": {},
}  # fmt: skip

GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 96, "ffn": 49152, "gated_mlp": False, "vocab": 51200,
        "seq": 2048}  # fmt: skip
LLAMA = {"layers": 12, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "gated_mlp": True, "vocab": 128256,
         "seq": 4096}  # fmt: skip

ROWS: list[dict[str, Any]] = [
    # Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, Table 5: GPT-3 175B
    BASE | GPT3 | {"id": "seqsel/full", "source_id": "seqsel", "gpu": "A100-80G-SXM", "gpu_mem_gb": 80, "n_gpus": 64,
                   "tp": 8, "pp": 8, "dp": 1, "vpp": 3, "mbs": 1, "gbs": 64, "sp": False, "recompute": "full",
                   "precision": "fp16", "framework": "Megatron-LM 2022", "step_time_s": 18.13},
    BASE | GPT3 | {"id": "seqsel/selective", "source_id": "seqsel", "gpu": "A100-80G-SXM", "gpu_mem_gb": 80,
                   "n_gpus": 64, "tp": 8, "pp": 8, "dp": 1, "vpp": 3, "mbs": 1, "gbs": 64, "sp": True,
                   "recompute": "selective (attention core)", "precision": "fp16", "framework": "Megatron-LM 2022",
                   "step_time_s": 13.75},
    # SimuMax's published validation on one node of 8 B200: 12 layers of Llama-3-70B
    BASE | LLAMA | {"id": "b200/tp2", "source_id": "b200", "gpu": "B200-180G", "gpu_mem_gb": 180, "n_gpus": 8, "tp": 2,
                    "pp": 1, "dp": 4, "mbs": 1, "gbs": 16, "sp": True, "zero": 1, "recompute": "none",
                    "precision": "bf16", "framework": "Megatron-LM 23e00ed0 + TE 2.11", "step_time_s": 0.7255,
                    "peak_mem_gib": 60.68, "mem_kind": "torch max_memory_allocated"},
    BASE | LLAMA | {"id": "b200/tp8", "source_id": "b200", "gpu": "B200-180G", "gpu_mem_gb": 180, "n_gpus": 8, "tp": 8,
                    "pp": 1, "dp": 1, "mbs": 1, "gbs": 4, "sp": True, "zero": 1, "recompute": "none",
                    "precision": "bf16", "framework": "Megatron-LM 23e00ed0 + TE 2.11", "step_time_s": 0.2809,
                    "peak_mem_gib": 28.29, "mem_kind": "torch max_memory_allocated"},
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_on_path() -> Iterator[None]:
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def priced(_benchmarks_on_path: None) -> dict[str, Any]:
    from published_runs import priced_rows
    from row_prices import prepare_rows

    from autopar.cost_model.constant_table import load_constants

    prepared, refused = prepare_rows(ROWS)
    assert not refused
    return {p.run.id: p for p in priced_rows(prepared, load_constants())}


@pytest.mark.parametrize("row", [row["id"] for row in ROWS])
def test_step_time(priced: dict[str, Any], row: str) -> None:
    assert abs(priced[row].error) < 0.12


@pytest.mark.parametrize("row", ["b200/tp2", "b200/tp8"])
def test_allocated_memory(priced: dict[str, Any], row: str) -> None:
    run = priced[row].run
    assert priced[row].memory_bytes["allocated"] == pytest.approx(run.peak_bytes, rel=0.02)


LLAMA_34B = {"layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 22016, "gated_mlp": True, "vocab": 32000,
             "seq": 4096}  # fmt: skip
LLAMA_405B = LLAMA | {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248, "seq": 8192}
SHARDED = BASE | {"zero": 3, "pp": 1, "tp": 1, "recompute": "full", "precision": "bf16", "gpu": "A100-80G-SXM",
                  "gpu_mem_gb": 80, "sp": False, "step_time_s": None}  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    # README of foundation-model-stack/fms-fsdp: Llama-2-34B on 128 A100, 400 Gb/s a node
    SHARDED | LLAMA_34B | {"id": f"fms-fsdp/mbs{mbs}", "source_id": "fms-fsdp", "n_gpus": 128, "dp": 128, "mbs": mbs,
                           "gbs": 128 * mbs, "framework": "PyTorch FSDP", "net": "400 Gb/s per node",
                           "tokens_per_s_per_gpu": rate} for mbs, rate in ((2, 700), (8, 772))
] + [
    # torchtitan, docs/performance.md of 2024: Llama-3.1-405B on 128 H100 of 94 GB, with and without asynchronous tp
    SHARDED | LLAMA_405B | {"id": f"torchtitan-405b/{rate}", "source_id": "torchtitan-405b", "n_gpus": 128, "tp": 8,
                            "dp": 16, "mbs": 2, "gbs": 32, "sp": True, "gpu": "H100-96G-HBM2e-500W", "gpu_mem_gb": 96,
                            "framework": "torchtitan", "precision": "fp8 linears", "overlap": {"async_tp": ring},
                            "tokens_per_s_per_gpu": rate} for ring, rate in ((False, 177), (True, 185))
]  # fmt: skip


def test_hidden_gathers_over_slow_networks_cost_little() -> None:
    """Runs that no constant was fitted to. Slowing compute by a fraction of the time of hidden collectives, as fast
    networks make it look, they came out 12 to 44 % too slow."""
    from published_runs import priced_rows
    from row_prices import prepare_rows

    from autopar.cost_model.constant_table import load_constants

    prepared, refused = prepare_rows(OTHERS)
    assert not refused
    assert {p.run.id: p.error for p in priced_rows(prepared, load_constants()) if abs(p.error) > 0.12} == {}


def test_recomputation_is_seen(priced: dict[str, Any]) -> None:
    """The paper measures 1.32 times the step with everything recomputed."""
    ratio = priced["seqsel/full"].parts["total"] / priced["seqsel/selective"].parts["total"]
    assert ratio == pytest.approx(18.13 / 13.75, rel=0.08)


def test_175b_on_256_a100_as_8_8_4(priced: dict[str, Any]) -> None:
    """Mixed Adam takes 16 to 18 bytes a parameter: 43 to 49 GB of state a device, which is most of its memory. The step
    runs at what such runs report, 40 to 60 % of the peak."""
    from row_prices import memory, prepare_rows, price

    from autopar.cost_model.constant_table import load_constants
    from autopar.cost_model.run_memory import run_memory

    constants = load_constants()
    row = ROWS[1] | {"id": "gpt3/256", "n_gpus": 256, "dp": 4, "gbs": 1536, "vpp": 1, "step_time_s": 50.0}
    (run,), refused = prepare_rows([row])
    assert not refused
    seconds = price(run, constants)["total"]
    model_flops = 6 * 174.6e9 * 1536 * 2048 * (1 + 2048 / (6 * 12288))
    assert 0.40 < model_flops / (seconds * 256 * 312e12) < 0.60
    peak = run_memory(run.work, run.run.layout, run.run.traits, constants.generation(run.generation))
    states = sum(peak.parts[name] for name in ("parameters", "gradients", "optimizer"))
    assert 16 * 174.6e9 / 64 * 0.95 < states < 18 * 174.6e9 / 64 * 1.1
    assert states / peak.allocated > 0.6
    assert memory(run, constants)["device"] < 80 * 2**30


def test_no_row_drops_out_silently() -> None:
    from row_prices import prepare_rows

    faults: dict[str, dict[str, Any]] = {"ep": {"ep": 8}, "gpu": {"gpu": "Z9"}, "n": {"seq": None}, "dp": {"dp": 3}}
    bad = [ROWS[0] | fault | {"id": f"x/{name}"} for name, fault in faults.items()]
    prepared, refused = prepare_rows(bad)
    assert not prepared
    assert set(refused) == {"x/ep", "x/gpu", "x/n", "x/dp"}
    assert "peak flops" in refused["x/gpu"]
    assert "seq" in refused["x/n"]


def test_what_follows_from_other_fields_is_worked_out() -> None:
    from published_rows import as_run

    row = ROWS[1]
    bare = {k: v for k, v in row.items() if k not in ("dp", "gbs", "cp", "ep", "extra", "overlap", "uncertain", "net")}
    run, whole = as_run(bare | {"n_micro": 64, "tokens_per_s_per_gpu": 100.0, "step_time_s": None}), as_run(row)
    assert run.layout == whole.layout
    assert run.step_s == pytest.approx(64 * 2048 / (100.0 * 64))
    unknown = as_run(row | {"framework": "Somebody's own 0.1", "recompute": None, "ffn": None, "vocab": None})
    assert {text.split()[0] for text in unknown.assumed} >= {"stack", "recompute", "ffn", "vocabulary"}
    assert unknown.shape.ffn == 4 * row["hidden"]


@pytest.mark.parametrize("value", [float("nan"), -1, 0, "8", 3.5, True])
@pytest.mark.parametrize("field", ["layers", "tp", "seq", "mbs"])
def test_what_is_no_count_is_refused_with_its_field(field: str, value: object) -> None:
    from row_prices import prepare_rows

    _, refused = prepare_rows([ROWS[0] | {field: value}])
    assert f"{field}: must be a positive integer" in refused["seqsel/full"]


@pytest.mark.parametrize("field", ["layers", "hidden", "gbs"])
def test_a_size_that_leaves_64_bits_is_refused_with_its_field(field: str) -> None:
    """One such row took the whole file down: its shape was captured in another process."""
    from row_prices import prepare_rows

    _, refused = prepare_rows([ROWS[0] | {field: 10**30}])
    assert f"{field}: {10**30} is more than any run has" in refused["seqsel/full"]


FIELDS = ("tp", "pp", "cp", "dp", "seq", "mbs", "gbs", "vocab", "n_gpus", "gpu_mem_gb", "layers", "hidden", "heads",
          "kv_heads", "ffn", "vpp", "ep", "n_micro", "zero", "zero_shard_gpus", "gpus_per_node", "step_time_s",
          "peak_mem_gib", "precision", "recompute", "framework", "net", "gpu", "mem_kind", "sp", "gated_mlp", "oom",
          "uncertain", "overlap", "extra")  # fmt: skip
NOT_STATED_BY_ZERO = ("zero", "sp", "gated_mlp", "oom", "overlap", "extra", "uncertain")


@pytest.mark.parametrize("field", FIELDS, ids="field {}".format)  # an id of "gpu" alone would be a mark
def test_every_field_is_priced_or_refused_whatever_it_holds(field: str) -> None:
    """Nothing ends the run, and no text or count takes a number that it cannot be."""
    from row_prices import prepare_rows

    values = (0, -1, 1.5, "x", None, float("nan"), 1e9, [1], {"a": [1]}, 2**24, 10**400, 1e-30)
    rows = [ROWS[2] | {field: value, "id": f"{i}"} for i, value in enumerate(values)]
    prepared, refused = prepare_rows(rows)
    assert len(prepared) + len(refused) == len(rows)
    if field not in NOT_STATED_BY_ZERO:
        assert {"0", "1", "5", "6", "7", "8", "10", "11"} <= set(refused), refused


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"step_time_s": 1e8}, "of the devices' peak rate"), ({"step_time_s": 0.02}, "of the devices' peak rate"),
        ({"peak_mem_gib": 60.68 * 1024}, "outside"), ({"peak_mem_gib": 0.06}, "outside"),
        ({"gpu_mem_gb": 1.5}, "not the memory of B200"), ({"n_micro": 3}, "is not gbs 16"),
        ({"precision": "int4"}, "not known: bf16"), ({"precision": "bf16 with fp8"}, "not known"),
        ({"step_time_s": None, "tokens_per_s_per_gpu": 1e7}, "of the devices' peak rate"),
    ],
)  # fmt: skip
def test_measurements_that_cannot_be_are_listed(fault: dict[str, Any], reason: str) -> None:
    """One slip of a unit would outweigh five hundred rows in a mean."""
    from row_prices import prepare_rows

    _, refused = prepare_rows([ROWS[2] | fault])
    assert reason in refused["b200/tp2"]


def test_what_a_row_does_not_state_is_listed_as_assumed() -> None:
    from published_rows import as_run

    bare = {k: v for k, v in ROWS[0].items() if k not in ("precision", "sp", "cp", "ep", "vpp")}
    run = as_run(bare | {"peak_mem_gib": 40.0, "mem_kind": "their tool"})
    assert {
        "precision not stated: 16 bits", "sp not stated: false", "cp, vpp, ep not stated: 1",
        "mem_kind 'their tool' is unknown: allocated",
    } <= set(run.assumed)  # fmt: skip


@pytest.mark.parametrize(
    ("stated", "mode", "said"),
    [
        ("selective", "selective", ""), ("selective (attention core)", "selective", ""), ("op-SAC", "op", ""),
        ("Full", "full", ""), ("selective layer (every 2nd)", "none", "is unknown: none"), (None, "none", "not stated"),
    ],
)  # fmt: skip
def test_a_recomputation_that_is_none_of_ours_is_said_to_be(stated: str | None, mode: str, said: str) -> None:
    from published_rows import as_run

    run = as_run(ROWS[2] | {"recompute": stated, "framework": "?"})
    assert run.layout.recompute == mode
    assert any(said in text for text in run.assumed if "recompute" in text) == bool(said)


def test_a_model_of_other_size_than_its_shape_is_said_to_be_priced_as_the_shape() -> None:
    """Experts, or a proxy of fewer layers: twelve layers of a 70B hold 11 billion."""
    from published_rows import as_run

    for stated, other in ((11.4, False), (70.6, True), (None, False)):
        run = as_run(ROWS[2] | {"params_b": stated})
        assert any("without experts" in text for text in run.assumed) == other


def test_names_that_look_like_others_are_told_apart() -> None:
    from published_rows import as_run
    from row_prices import prepare_rows

    assert as_run(ROWS[2] | {"precision": "FP8-MX"}).layout.fp8 == "mxfp8"
    _, refused = prepare_rows([ROWS[2] | {"gpu": "GH200-96G", "gpu_mem_gb": 96}])
    assert "unknown device 'GH200-96G'" in refused["b200/tp2"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no rows"), (b"\n \n", "holds no rows"), (b"\x7fELF\x02\xff\xfe", "not UTF-8 text"),
        (b"[" * 100_000, "not JSON"), (b'{"id": 1}\n{"id"', ":2"), (b"[1]", "not a JSON object"),
    ],
)  # fmt: skip
def test_files_that_hold_no_rows_end_with_the_reason(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import published_runs

    data = tmp_path / "rows.jsonl"
    data.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["published_runs.py", "--data", str(data)])
    with pytest.raises(SystemExit) as stopped:
        published_runs.main()
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert reason in said
    assert str(data) in said


def test_rows_are_lines_whatever_their_texts_hold(tmp_path: Path) -> None:
    from published_rows import read_rows

    data = tmp_path / "rows.jsonl"
    data.write_text('\ufeff{"id": "a\u2028b"}\r\n{"id": "c"}\n', encoding="utf-8")
    assert [row["id"] for row in read_rows(data)] == ["a\u2028b", "c"]


def test_a_text_that_is_a_list_is_refused_with_its_field() -> None:
    from row_prices import prepare_rows

    _, refused = prepare_rows([ROWS[0] | {"framework": ["Megatron-LM"]}])
    assert "framework: must be a text" in refused["seqsel/full"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"precision": "fp32"}, "fp32"), ({"precision": "fp8"}, "no peak rate in fp8"), ({"zero": 7}, "ZeRO level 7"),
        ({"kv_heads": 7}, "key-value"), ({"step_time_s": None}, "nothing measured"), ({"vpp": 99}, "792 stages"),
    ],
)  # fmt: skip
def test_rows_without_a_price_say_why(fault: dict[str, Any], reason: str) -> None:
    from row_prices import prepare_rows

    prepared, refused = prepare_rows([ROWS[0] | fault, ROWS[0] | fault])
    assert not prepared
    assert len(refused) == 2, "rows of one name do not hide each other"
    assert all(reason in text for text in refused.values())


@pytest.mark.parametrize(
    ("text", "rate"),
    [("4x100 Gb/s RoCE per node", 6.25e9), ("1600 Gb/s RoCE per node", 25e9), ("400 Gb/s per GPU", 50e9), ("?", None)],
)
def test_networks_are_read(text: str, rate: float | None) -> None:
    from row_facts import network_of

    assumed: list[str] = []
    assert network_of({"net": text, "gpu": "A100", "n_gpus": 64}, assumed)[1] == rate
    assert bool(assumed) == (rate is None)


def test_scores(priced: dict[str, Any]) -> None:
    from scoring import memory_scores, ordering_scores, time_scores

    rows = list(priced.values())
    scores = time_scores(rows)
    assert scores["overall"]["n"] == len(ROWS)
    assert set(scores["by_source"]["b200"]) >= {"n", "median_abs_error", "mean_abs_error", "bias"}
    assert scores["by_source"]["b200"]["mean_abs_error"] == pytest.approx(
        sum(abs(p.error) for p in rows if p.run.source == "b200") / 2
    )
    assert memory_scores(rows)["allocated"]["n"] == 2
    assert ordering_scores(rows)["overall"]["pairs"] >= 1


def test_a_source_that_is_scored_is_not_fitted() -> None:
    """Leaving a source out starts at the priors: nothing of it may remain in the constants."""
    from fit_constants import cross_validate
    from row_prices import prepare_rows

    from autopar.cost_model.constant_table import load_constants

    prepared, _ = prepare_rows(ROWS)
    found = cross_validate(prepared, rounds=1)
    assert set(found) == {"seqsel", "b200"}
    without_a100 = found["seqsel"].table
    assert without_a100["ampere.matmul_16bit"].value == load_constants().table["ampere.matmul_16bit"].prior
