"""The public names: of functions and classes, of their arguments, and of the variables of the environment."""

import importlib
import inspect
import re
from dataclasses import fields

import pytest

import parallel_lce
import torchtitan_standin
from releases import ROOT

LOGITS = "logit_scale logit_softcap temperature"
TENSOR_PARALLEL = "process_group sequence_parallel sequence_dim vocab_start vocab_size reduce_dtype reduce_hidden_grad"
MEMORY = "logits_budget gradient_filter"
ALL = f"{LOGITS} {TENSOR_PARALLEL} {MEMORY}"
LOSS = f"reduction ignore_index label_smoothing z_loss {ALL}"
ASKED = "mean_logit entropy argmax sum_p_squared"
DIVERGENCE = f"beta reduction ignore_index target student_bias logits_budget {LOGITS} {TENSOR_PARALLEL}"
OF_MODEL = "model input_ids position_ids attention_mask labels"
COUNTED = "mask counted_tokens"
# Of each module its public functions; of each the arguments that may be positional, in order, and after * the others.
FUNCTIONS = {
    "parallel_lce": {
        "linear_cross_entropy": "input linear_weight target * linear_bias token_weight counted_tokens weight options "
        + LOSS,
        "token_statistics": f"input linear_weight target * linear_bias {ASKED} selected top_k {COUNTED} {ALL}",
        "token_loss": "input linear_weight target loss per_token * linear_bias reduction ignore_index counted_tokens "
        f"{ASKED} {ALL}",
        "selected_log_probs": f"input linear_weight selected * linear_bias {LOGITS} {TENSOR_PARALLEL}",
        "count_tokens": "target ignore_index *",
        "vocab_parallel_cross_entropy": "vocab_parallel_logits target label_smoothing tp_group *",
        "LinearCrossEntropy": f"* {LOSS}",
        "LinearCrossEntropyParallel": "* input_layouts use_local_output",
    },
    "parallel_lce.distillation": {
        "divergence": "student_hidden student_weight teacher_hidden teacher_weight * teacher_bias "
        f"teacher_logit_scale teacher_logit_softcap {DIVERGENCE}",
        "top_k_divergence": f"student_hidden student_weight teacher_ids teacher_log_probs * tail {DIVERGENCE}",
    },
    "parallel_lce.rl": {
        "linear_cross_entropy": "hidden weight labels temperature reduction dist_process_group * bias vocab_size "
        f"logits_budget reduce_hidden_grad sum_p_squared {COUNTED}",
        "from_parallel_hidden_states_to_logprobs": "tensor_parallel_hidden_states output_weight_layer "
        "runtime_gather_output target vocab_start_index vocab_end_index tp_group inference_only cp_group chunk_size * "
        f"bias vocab_size logits_budget {COUNTED}",
        "FusedLinearLogprobTriton": "*",
    },
    "parallel_lce.megatron": {
        "patch": "logits_budget * cross_entropy reduce_dtype gradient_filter skip_masked z_loss label_smoothing "
        "vocab_size token_metrics",
        "unpatch": "*",
        "fuse": "model * given",
        "explain": "model *",
        "token_log_probs": f"{OF_MODEL} * temperature entropy forward_arguments",
        "token_loss": f"{OF_MODEL} loss per_token * temperature reduction entropy sum_p_squared mean_logit "
        "forward_arguments",
        "token_metrics": "model *",
    },
    "parallel_lce.transformers": {
        "patch": f"model * token_accuracy token_metrics eval_logits {MEMORY}",
        "unpatch": "model *",
        "explain": "model *",
    },
    "parallel_lce.trl": {"patch": "* logits_budget", "unpatch": "*"},
    "parallel_lce.verl": {"patch": "* skip_masked", "unpatch": "*"},
    "parallel_lce.torchtitan": {"linear_cross_entropy": f"cfg * {MEMORY} skip_masked"},
}
# Results, warnings, and a loss of torchtitan's protocol.
OTHERS = {
    "parallel_lce": {"TokenStatistics"},
    "parallel_lce.megatron": {"LogitsWarning", "TokenLogProbs", "TokenMetrics"},
    "parallel_lce.transformers": {"Linear", "LogitsWarning"},
    "parallel_lce.trl": {"TRLWarning"},
    "parallel_lce.torchtitan": {"LinearCrossEntropyLoss"},
}
FIELDS = """
lse target_logit target_log_prob mean_logit mean_log_prob expected_logit entropy sum_p_squared selected_log_prob
max_logit argmax top_logits top_ids vocab_size
"""


def _imported(name: str):
    if name != "parallel_lce.torchtitan":
        return importlib.import_module(name)
    with torchtitan_standin.installed() as ours:
        return ours


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_these_arguments_and_modules_no_other_names(name):
    module = _imported(name)
    own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    public = set(getattr(module, "__all__", {name for name in own if not name.startswith("_")}))
    assert public == FUNCTIONS[name].keys() | OTHERS.get(name, set())
    for function, arguments in FUNCTIONS[name].items():
        parameters = inspect.signature(getattr(module, function)).parameters.values()
        named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)}
        positional, _, others = arguments.partition("*")
        assert [p.name for p in parameters if p.name not in named] == positional.split(), function
        assert named == {*others.split()}, function


def test_statistics_have_these_fields():
    assert {field.name for field in fields(parallel_lce.TokenStatistics)} == {*FIELDS.split()}


def test_no_other_variables_of_the_environment_are_read():
    texts = {path: path.read_text() for path in (ROOT / "parallel_lce").rglob("*.py")}
    found = set(re.findall(r"PARALLEL_LCE_(\w*[A-Z])", "\n".join(texts.values())))
    assert found == {"LOGITS_BUDGET", "BACKEND", "DEBUG", "SKIP_MASKED"}
    assert [path.name for path, text in texts.items() if "SKIP_MASKED" in text] == ["verl.py"]
