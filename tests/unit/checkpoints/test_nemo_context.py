"""What a NeMo 2 checkpoint has beside its weights."""

import json

import pytest

from tests.unit.small_models import DENSE
from tools.nemo_context import CONTEXT, TOKENIZER, Call, Name, check_model, write_context


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"eos_token": "<eos>"}, {"eos_token": "<eos>"}),
        ({"tokenizer_class": "Qwen2Tokenizer"}, {"tokenizer_class": "Qwen2Tokenizer"}),
        ({"tokenizer_class": "TokenizersBackend"}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ],
)
def test_a_tokenizer_is_one_that_transformers_4_knows(tmp_path, settings, written):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = Call(Name("models", "Model"), {"tokenizer": Call(Name("tokenizers", "Auto"), {})})
    write_context(tmp_path, tmp_path / CONTEXT, model)
    assert (
        json.loads((tmp_path / CONTEXT / TOKENIZER / "tokenizer_config.json").read_text())
        == written
    )


@pytest.mark.parametrize("content", ["", "config: [1,", "- a", "config: 3", "a: !!python/none"])
def test_a_description_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / CONTEXT).mkdir()
    (tmp_path / CONTEXT / "model.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"context/model.yaml.* cannot be read"):
        check_model(tmp_path, DENSE)
