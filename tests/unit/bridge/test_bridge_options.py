"""The bridge's settings as flat fields: the same corrections, from YAML and from a command line."""

from dataclasses import fields, replace

import pytest

from rlq.bridge import CORRECTIONS, Correction, RejectRule
from rlq.bridge.correction.options import BridgeConfig
from rlq.errors import ConfigError


def test_defaults_are_those_of_the_correction():
    assert BridgeConfig().correction() == Correction()
    names = {f.name.removeprefix("bridge_") for f in fields(BridgeConfig)}
    assert names - {"veto_low", "veto_high", "preset"} | {"veto"} == set(Correction.__dataclass_fields__)


def test_preset_keeps_what_the_fields_do_not_change():
    assert BridgeConfig(bridge_preset="trl/token_mask").correction() == Correction.preset("trl/token_mask")
    changed = BridgeConfig(bridge_preset="trl/token_mask", bridge_upper=4.0, bridge_veto_high=50.0).correction()
    assert changed == Correction.preset("trl/token_mask", upper=4.0, veto=(None, 50.0))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_preset_equals_its_resolved_fields(name):
    config = BridgeConfig(bridge_preset=name)
    if CORRECTIONS[name].bypass and Correction.preset(name).mode == "none":
        with pytest.raises(ConfigError, match="nothing would correct"):
            config.resolved()
        return
    resolved = config.resolved()
    assert resolved.correction() == config.correction() == Correction.preset(name)
    assert replace(resolved, bridge_preset=None).correction() == Correction.preset(name)
    assert resolved.resolved() == resolved
    assert BridgeConfig(**config.record()) == resolved


def test_rules_are_written_in_one_line():
    config = BridgeConfig(bridge_reject=["k3:mean::0.01", "ratio:token:0.5:2"])
    rules = (RejectRule("k3", "mean", upper=0.01), RejectRule("ratio", "token", 0.5, 2.0))
    assert config.correction().reject == rules
    assert BridgeConfig(bridge_veto_low="none").correction().veto is None
    assert BridgeConfig(bridge_veto_low=None).correction() == Correction()


@pytest.mark.parametrize(
    "rules", [[], ["k3"], ["k3:mean:a:b"], ["k9:mean::1"], ["k3:mean::"], ["k3:mean::0.1:up"], ["none", "none"]]
)
def test_malformed_rules_are_refused(rules):
    with pytest.raises(ConfigError):
        BridgeConfig(bridge_reject=rules).correction()


def test_command_line_parser_takes_every_field():
    from transformers import HfArgumentParser

    parser = HfArgumentParser(BridgeConfig)  # type: ignore[arg-type]  # a dataclass is a DataClassType
    arguments = ["--bridge_preset", "nemo/icepop", "--bridge_reject", "k3:mean::0.01", "k2:max::3"]
    (config,) = parser.parse_args_into_dataclasses(arguments)
    assert config.correction().mode == "mask"
    assert len(config.correction().reject) == 2
    (config,) = parser.parse_args_into_dataclasses(["--bridge_preset", "nemo/icepop", "--bridge_lower", "none"])
    assert config.correction() == Correction.preset("nemo/icepop", lower=None)


def test_a_preset_that_leaves_the_correction_to_the_ppo_ratio_is_refused():
    with pytest.raises(ConfigError, match="nothing would correct"):
        BridgeConfig(bridge_preset="verl/bypass_ppo_clip").correction()
