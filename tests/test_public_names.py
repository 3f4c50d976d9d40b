"""The public names: functions and classes, and the variables of the environment."""

import importlib
import re

import pytest

import torchtitan_standin
from releases import ROOT

# Of each module its public functions and classes.
NAMES = {
    "parallel_lce": "linear_cross_entropy token_statistics token_loss selected_log_probs count_tokens TokenStatistics "
    "vocab_parallel_cross_entropy LinearCrossEntropy LinearCrossEntropyParallel",
    "parallel_lce.distillation": "divergence top_k_divergence",
    "parallel_lce.rl": "linear_cross_entropy from_parallel_hidden_states_to_logprobs FusedLinearLogprobTriton",
    "parallel_lce.megatron": "patch unpatch fuse explain token_log_probs token_loss token_metrics LogitsWarning "
    "TokenLogProbs TokenMetrics",
    "parallel_lce.transformers": "patch unpatch explain Linear LogitsWarning",
    "parallel_lce.trl": "patch unpatch TRLWarning",
    "parallel_lce.verl": "patch unpatch",
    "parallel_lce.torchtitan": "linear_cross_entropy LinearCrossEntropyLoss",
}


def _imported(name: str):
    if name != "parallel_lce.torchtitan":
        return importlib.import_module(name)
    with torchtitan_standin.installed() as ours:
        return ours


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_these_public_names_and_no_others(name):
    module = _imported(name)
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    public = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    assert {*public} == {*NAMES[name].split()}


def test_no_other_variables_of_the_environment_are_read():
    texts = {path: path.read_text() for path in (ROOT / "parallel_lce").rglob("*.py")}
    found = set(re.findall(r"PARALLEL_LCE_(\w*[A-Z])", "\n".join(texts.values())))
    assert found == {"LOGITS_BUDGET", "BACKEND", "DEBUG", "SKIP_MASKED"}
    assert [path.name for path, text in texts.items() if "SKIP_MASKED" in text] == ["verl.py"]
