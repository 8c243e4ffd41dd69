"""The tokenizer of a model directory."""

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.config.model_config import read_json
from megatron_rl.errors import concerning

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a HF directory; nothing is downloaded.

    Raises:
        ValueError: the directory or its tokenizer files are missing or unreadable, or there is no
            end-of-sequence token.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"model.path = {folder}: no such directory; give a HF directory with config.json,"
            " safetensors and tokenizer files"
        )
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ValueError(
            f"model.path = {folder}: no tokenizer in it (one of {', '.join(_VOCABULARY_FILES)});"
            " copy the files of the model's tokenizer there"
        )
    # The library behind it raises whatever a damaged file leads to.
    unreadable = f"model.path = {folder}: its tokenizer files cannot be read"
    with concerning(unreadable, "copy them again from the model"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.path = {folder}: the tokenizer has no eos_token, so no response could end; set"
            " it in tokenizer_config.json"
        )
    _check_ids(tokenizer, folder)
    return tokenizer


def _check_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises ValueError when a token id lies outside the model's embedding."""
    file = folder / "config.json"
    rows = read_json(file).get("vocab_size") if file.is_file() else None
    if not isinstance(rows, int):
        return
    for name in ("config.json", "generation_config.json"):
        ends = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        for end in ends if isinstance(ends, list) else [ends]:
            if isinstance(end, int) and end >= rows:
                raise ValueError(
                    f"model.path = {folder}: {name} has eos_token_id = {end}, beyond vocab_size ="
                    f" {rows} of config.json; correct it"
                )
    # Fewer tokens than rows are usual: models pad their embedding to a round number.
    vocabulary = tokenizer.get_vocab().items()
    beyond = sorted((number, token) for token, number in vocabulary if number >= rows)
    if beyond:
        shown = ", ".join(f"{token!r} = {number}" for number, token in beyond[:3])
        raise ValueError(
            f"model.path = {folder}: {len(beyond)} tokens of the tokenizer lie beyond vocab_size ="
            f" {rows} of config.json ({shown}); the tokenizer belongs to another model: copy the"
            " right one, or take the added tokens out"
        )


def text_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """The text of tokens without special ones."""
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
