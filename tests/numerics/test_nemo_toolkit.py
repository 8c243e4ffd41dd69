"""nemo-toolkit opens what is written here, and what it writes is read here. It needs an environment
of its own, hence an option:

pytest -m full tests/numerics/test_nemo_toolkit.py --nemo-python=PYTHON
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rl.checkpoints import megatron_format
from megatron_rl.models import read_architecture
from tests import zoo
from tests.launch import run
from tests.numerics.nemo_models import save_formula, save_tokenizer
from tests.numerics.nemo_worker import IDS
from tests.numerics.test_nemo_checkpoint import NAMES
from tools import megatron_writer
from tools.convert_checkpoint import to_hf, to_nemo

pytestmark = pytest.mark.full
WORKER = Path(__file__).with_name("nemo_worker.py")
LOGITS_ATOL = 1e-5


@pytest.fixture(scope="module")
def nemo(request, tmp_path_factory):
    """Runs the worker with NeMo's Python: ``nemo("open", *paths)``; returns its output."""
    python = request.config.getoption("--nemo-python")
    if python is None:
        pytest.skip("needs nemo-toolkit in its own environment: --nemo-python=PYTHON")
    assert Path(python).is_file(), f"--nemo-python: there is no {python}"
    # No network; an environment of its own must not find this one's packages.
    env = {
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        # Where CUDA's compiler is and no device: megatron-core compiles something at its import.
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "NEMO_HOME": str(tmp_path_factory.mktemp("nemo_home")),
    }

    def call(action: str, *paths: Path) -> str:
        return run([python, str(WORKER), action, *map(str, paths)], 280, env=env).stdout

    return call


def expected(path: Path) -> dict[str, torch.Tensor]:
    """The parameters of megatron's own layers, by name, made of the HF directory."""
    arch, _ = read_architecture(path)
    tensors = load_file(path / "model.safetensors")
    found = {}
    for item in megatron_format.layer_tensors(arch, arch.vocab_size):
        parameter = item.parameter
        expert = (
            "" if parameter.expert is None else f"mlp.experts.local_experts.{parameter.expert}."
        )
        layer = "" if parameter.layer is None else f"decoder.layers.{parameter.layer}."
        whole = megatron_writer.to_megatron(
            item, arch, {name: tensors[name] for name in parameter.names}
        )
        found[f"{layer}{expert}{parameter.slot.megatron}"] = whole
    return found


def test_nemo_opens_every_family(nemo, tmp_path):
    """NeMo's loader builds the model from context/ and loads weights/: every parameter bit-equal,
    logits those of transformers."""
    paths = []
    names = [*NAMES, "linear"]
    zoo.save_tiny_model("qwen2", tmp_path / "linear")
    config = json.loads((tmp_path / "linear" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    (tmp_path / "linear" / "config.json").write_text(json.dumps(config))
    for name in names:
        if name in NAMES:
            zoo.save_tiny_model(name, tmp_path / name)
        save_tokenizer(tmp_path / name)
        to_nemo(tmp_path / name, tmp_path / f"{name}_nemo")
        paths += [tmp_path / f"{name}_nemo", tmp_path / f"{name}.safetensors"]
    output = nemo("open", *paths)
    assert output.count("OK open ") == output.count("AutoTokenizer Trainer") == len(names), output
    for name in names:
        loaded = load_file(tmp_path / f"{name}.safetensors")
        logits = loaded.pop("logits")
        wanted = expected(tmp_path / name)
        assert sorted(loaded) == sorted(wanted)
        assert all(torch.equal(loaded[key], wanted[key]) for key in wanted), name
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float32
        )
        with torch.no_grad():
            reference = model(IDS[None]).logits[0]
        gap = (logits - reference).abs().max().item()
        print(f"{name}: largest logit difference {gap:.1e} of {reference.abs().max():.1f}")
        assert gap <= LOGITS_ATOL, f"{name}: logits differ by {gap}"


def test_nemo_writes_and_it_is_read(nemo, tmp_path):
    """The kept checkpoint of test_nemo_checkpoint.py anew, and families that NeMo's importers take
    at these sizes."""
    names = ("llama", "qwen2_tied", "mistral", "mixtral")
    for name in names:
        save_tokenizer(zoo.save_tiny_model(name, tmp_path / name))
    save_formula(tmp_path / "formula")
    paths = []
    for name in (*names, "formula"):
        config = tmp_path / name / "tokenizer_config.json"
        config.write_text(
            config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
        )  # NeMo has transformers 4
        paths += [tmp_path / name, tmp_path / f"{name}_nemo"]
    output = nemo("write", *paths)
    assert output.count("OK write ") == len(names) + 1, output
    for name in (*names, "formula"):
        to_hf(tmp_path / f"{name}_nemo", tmp_path / f"{name}_back", tmp_path / name, 10**9)
        one, two = (
            load_file(path / "model.safetensors")
            for path in (tmp_path / name, tmp_path / f"{name}_back")
        )
        assert sorted(one) == sorted(two) and all(torch.equal(one[key], two[key]) for key in one), (
            name
        )
