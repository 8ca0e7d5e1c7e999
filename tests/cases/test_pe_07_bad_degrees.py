"""pe-07 (pytorch/torchtitan#2577, #2574): bad degrees are refused in one readable sentence, before any capture."""

from __future__ import annotations

import pytest

from autopar import cli
from autopar.errors import SpecError
from autopar.pins import Pins
from autopar.specs import ClusterSpec, TrainSpec


@pytest.mark.parametrize(
    ("pins", "rule", "legal"),
    [
        (["cp=3"], "cp 3 does not divide the 8 devices", "cp one of 1, 2, 4, 8"),
        (["dp=2", "tp=2", "pp=4"], "dp 2 x tp 2 x pp 4 = 16 does not divide the 8 devices", "a product of 1, 2, 4, 8"),
        (["dp=2", "tp=1", "pp=2", "cp=1"], "= 4 uses 4 of the 8 devices", "product is 8"),
        (["dp=8"], "global batch of 12 sequences cannot be shared equally by dp 8", "dp one of 1, 2, 4"),
        (["microbatch=5"], "microbatch 5 does not divide the global batch of 12", "microbatch one of 3, 4, 6"),
        (["dp=2", "microbatch=4"], "microbatch 4 does not divide 12 / dp 2 = 6", "microbatch one of 2, 3, 6"),
        (["zero=1", "tp=4", "pp=2"], "zero 1 shards over dp x cp, and the pins leave one such rank", "dp x cp at 2"),
        (["zero=3", "dp=1", "cp=1"], "zero 3 shards over dp x cp, and the pins leave one such rank", "dp x cp at 2"),
        (["cp=4"], "18 tokens cannot be cut into 4 equal parts", "cp 1"),
    ],
)
def test_rule_values_and_legal_values_are_stated(pins: list[str], rule: str, legal: str) -> None:
    with pytest.raises(SpecError) as caught:
        Pins.parse(pins).check(ClusterSpec.parse("local:8"), TrainSpec(global_batch=12, seq_len=18))
    text = str(caught.value)
    assert rule in text
    assert legal.split(" one of ")[0] in text
    assert all(number in text.rpartition("Try:")[2] for number in legal.rpartition(" of ")[2].split(", "))
    assert "\n" not in text


def test_cp_3_of_16_tokens_on_devices_that_allow_it() -> None:
    with pytest.raises(SpecError, match="16 tokens cannot be cut into 3 equal parts.*cp one of 1, 2$"):
        Pins.parse(["cp=3"]).check(ClusterSpec.parse("local:6"), TrainSpec(global_batch=6, seq_len=16))


def test_legal_pins_pass() -> None:
    pins = Pins.parse(["dp=2", "tp=2", "pp=2", "cp=1", "microbatch=3"])
    pins.check(ClusterSpec.parse("local:8"), TrainSpec(global_batch=12, seq_len=18))
    Pins().check(ClusterSpec.parse("local:8"), TrainSpec())


@pytest.mark.parametrize(
    ("cluster", "pin", "says"),
    [
        # llama-tiny has 4 heads and 4 layers: both rules need the model's structure, neither its weights.
        ("local:3", "tp=3", "tp=3 cannot shard the 4 attention heads"),
        ("local:5", "pp=5", "pp at most 4"),
    ],
)
def test_degrees_the_model_does_not_allow(
    capsys: pytest.CaptureFixture[str], cluster: str, pin: str, says: str
) -> None:
    arguments = ["plan", "--model", "llama-tiny", "--cluster", cluster, "--global-batch", "15", "--seq-len", "16"]
    assert cli.main([*arguments, "--pin", pin]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert pin in error
    assert error.count("autopar: error") == 1
