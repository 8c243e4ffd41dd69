"""Images of a micro-batch: their places among its tokens, their positions, their features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.models import FAMILIES
from megatron_rl.models.base import Vision
from megatron_rl.protocols import ImageProcessor
from megatron_rl.runtime.device import to_device
from megatron_rl.types import Image, SequenceBatch

Grid = tuple[int, int, int]  # time, rows and columns of patches


@dataclass(frozen=True)
class PlacedImages:
    """The distinct images that tokens of this rank stand for.

    ``grids``: of each, on the host. Token ``places[i]`` of this rank takes feature ``source[i]``,
    counted over all images.
    """

    images: tuple[Image, ...]
    processor: ImageProcessor
    grids: Int[Tensor, "images 3"]
    places: Int[Tensor, " n"]
    source: Int[Tensor, " n"]

    def pixels(self, share: slice) -> Float[Tensor, "patches numbers"]:
        """Patches of the images of ``share``, made now: a minibatch has many micro-batches, and
        takes 18 KiB of pixels for a token."""
        patches = torch.cat([self.processor.pixels(image) for image in self.images[share]])
        return to_device(patches, self.places.device)


@dataclass(frozen=True)
class VisionBatcher:
    """What packing needs of a vision-language model."""

    vision: Vision
    processor: ImageProcessor | None  # None where no prompt has images
    has_tower: bool  # this rank's stage makes features

    def prepare(
        self, batch: SequenceBatch, rows: Sequence[int], lengths: Sequence[int]
    ) -> VisionInputs:
        """The images of ``rows``, each of which is ``lengths[i]`` tokens long with its padding.

        Raises:
            ValueError: the image tokens of a prompt are not those of its images.
        """
        images: list[Image] = []
        grids: list[Grid] = []
        positions = []
        numbers = []
        features = []
        offsets = batch.offsets.tolist()
        prompt_lengths = batch.prompt_lengths.tolist()
        for row, length in zip(rows, lengths, strict=True):
            own = () if batch.images is None else batch.images[row]
            prompt = batch.token_ids[offsets[row] : offsets[row] + prompt_lengths[row]]
            is_image = prompt == self.vision.image_token
            own_grids = self._grids(row, own, int(is_image.sum()))
            sizes = torch.tensor([self.num_tokens(grid) for grid in own_grids], dtype=torch.long)
            positions.append(rope_positions(is_image, length, own_grids, self.vision.merge))
            number = torch.full((length,), -1)
            feature = torch.zeros(length, dtype=torch.long)
            places = is_image.nonzero().squeeze(1)
            number[places] = torch.repeat_interleave(len(images) + torch.arange(len(own)), sizes)
            starts = sizes.cumsum(0) - sizes
            feature[places] = torch.arange(len(places)) - torch.repeat_interleave(starts, sizes)
            numbers.append(number)
            features.append(feature)
            images += own
            grids += own_grids
        table = (torch.cat(positions, 1), torch.cat(numbers), torch.cat(features))
        return VisionInputs(self, images, grids, *table)

    def _grids(self, row: int, images: Sequence[Image], found: int) -> list[Grid]:
        """``found``: image tokens in the prompt."""
        if images and self.processor is None:
            raise ValueError(
                f"packing: row {row} has {len(images)} images, but the policy was built without an"
                " image processor; give PolicySettings.image_processor"
            )
        grids = [self.processor.grid(image) for image in images] if self.processor else []
        wanted = sum(self.num_tokens(grid) for grid in grids)
        if found != wanted:
            raise ValueError(
                f"packing: the prompt of row {row} has {found} image tokens"
                f" ({self.vision.image_token}), but its {len(grids)} images take {wanted}; give the"
                " images that the prompt was made with"
            )
        return grids

    def num_tokens(self, grid: Grid) -> int:
        """Image tokens of an image of so many patches."""
        time, rows, columns = grid
        return time * rows * columns // self.vision.merge**2


@dataclass(frozen=True)
class VisionInputs:
    """The images of the rows of a micro-batch, and a table over the tokens of these rows, whole
    and padded, end to end: position, number of the image (-1: none), feature of that image."""

    batcher: VisionBatcher
    images: Sequence[Image]
    grids: Sequence[Grid]
    positions: Int[Tensor, "3 tokens"]
    image_of: Int[Tensor, " tokens"]
    feature_of: Int[Tensor, " tokens"]

    def placed(self, tokens: Int[Tensor, " t"], device: torch.device) -> PlacedImages | None:
        """The images of packed ``tokens`` (places in the table); None where there are none, or
        another stage makes the features. An image that several rows have counts once."""
        numbers = self.image_of[tokens]
        places = (numbers >= 0).nonzero().squeeze(1)
        if not len(places) or not self.batcher.has_tower:
            return None
        assert self.batcher.processor is not None
        distinct: dict[str, int] = {}  # digest -> first feature
        chosen: list[int] = []
        first_feature = torch.zeros(len(self.images), dtype=torch.long)
        num_features = 0
        for number in numbers[places].unique().tolist():
            digest = self.images[number].digest
            if digest not in distinct:
                distinct[digest] = num_features
                chosen.append(number)
                num_features += self.batcher.num_tokens(self.grids[number])
            first_feature[number] = distinct[digest]
        source = first_feature[numbers[places]] + self.feature_of[tokens][places]
        return PlacedImages(
            images=tuple(self.images[each] for each in chosen),
            processor=self.batcher.processor,
            grids=torch.tensor([self.grids[each] for each in chosen]),
            places=to_device(places, device),
            source=to_device(source, device),
        )


class ImageAngles(MultimodalRotaryEmbedding):
    """Rotary angles of which some belong to the time, the row and the column of a position.

    megatron's class has them one after the other alone, and would cut a packed row over context
    ranks as if it were one sequence.
    """

    axes: Tensor  # 0, 1 or 2 of each angle

    def forward(
        self, position_ids: Tensor, mrope_section: Any, cp_group: Any = None
    ) -> Float[Tensor, "tokens 1 1 angles"]:
        """Angles of all context ranks' tokens: attention takes this rank's of each sequence."""
        of_angles = position_ids[:, 0].to(self.inv_freq.dtype).index_select(0, self.axes).t()
        angles = of_angles * self.inv_freq
        return torch.cat((angles, angles), -1)[:, None, None]


def set_image_angles(model: Any, section: Sequence[int], *, interleaved: bool) -> None:
    """Makes megatron's rotary embedding of ``model`` an ``ImageAngles``.

    Example: a section of 4, 2 and 2 gives ``0 0 0 0 1 1 2 2``, interleaved ``0 1 2 0 1 2 0 0``.
    Source: apply_multimodal_rotary_pos_emb of Qwen2.5-VL and recomposition_frequencies of Qwen3-VL
    in transformers.
    """
    axes = [axis for axis, count in enumerate(section) for _ in range(count)]
    if interleaved:
        axes = [at % 3 if at < 3 * section[at % 3] else 0 for at in range(sum(section))]
    angles = model.rotary_pos_emb
    angles.__class__ = ImageAngles
    # A buffer goes where the model goes; frequencies would be rounded with it.
    angles.register_buffer("axes", torch.tensor(axes), persistent=False)


def rope_positions(
    is_image: Tensor, length: int, grids: Sequence[Grid], merge: int
) -> Int[Tensor, "3 length"]:
    """Time, row and column of each token of a sequence whose prompt is ``is_image``; ``grids``: of
    each image, in patches, ``merge`` by ``merge`` of which are a token.

    Text counts on by one in all three. An image stands at the next number, its rows and columns
    count from there, and text continues after its longer side.

    Example, an image of 1 row and 2 columns of tokens between two others: time 0 1 1 3, row 0 1 1
    3, column 0 1 2 3.

    Source: get_rope_index of Qwen2.5-VL in transformers.
    """
    parts = []
    places = is_image.nonzero().squeeze(1).tolist()
    done = 0  # tokens
    seen = 0  # image tokens
    position = 0
    for time, patch_rows, patch_columns in grids:
        rows = patch_rows // merge
        columns = patch_columns // merge
        first = places[seen]
        parts.append((torch.arange(first - done) + position).expand(3, -1))
        position += first - done
        axes = torch.meshgrid(*map(torch.arange, (time, rows, columns)), indexing="ij")
        parts.append(torch.stack(axes).reshape(3, -1) + position)
        position += max(rows, columns)
        seen += time * rows * columns
        done = first + time * rows * columns
    parts.append((torch.arange(length - done) + position).expand(3, -1))
    return torch.cat(parts, 1)


def add_tower(
    model: torch.nn.Module, hf: Any, config: TransformerConfig, *, recompute: bool, frozen: bool
) -> None:
    """Gives the first stage its tower, ``model.visual``, without weights.

    ``recompute``: each of its blocks is run again in the backward.
    """
    make = FAMILIES[hf.architectures[0]].tower
    assert make is not None, f"family of {hf.architectures[0]} has a vision part and no tower"
    # Drawing weights would take seconds, and numbers from the global random state.
    with torch.device("meta"):
        tower: Any = make(hf)
    tower = tower.to(config.params_dtype).to_empty(device="cpu")
    if recompute:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in tower.parameters():
        # Every tensor rank has the whole gradient. Where kernels are not deterministic, its copies
        # would drift apart; megatron averages what has this mark.
        parameter.average_gradients_across_tp_domain = True
        parameter.requires_grad_(not frozen)
    model.visual = tower
    add_deep_features(model, FAMILIES[hf.architectures[0]].read(hf).vision)


def add_deep_features(model: Any, vision: Vision | None) -> None:
    """Behind each of the first layers the features of one block of the tower are added to those of
    the tower's end, see ``embed``. Source: DeepStack, arXiv:2406.04334."""
    model.deep_features = []

    def add(layer: Any, arguments: Any, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        states, context = result
        if model.deep_features:
            states = states + model.deep_features.pop(0)
        return states, context

    for layer in model.decoder.layers[: vision.num_deep if vision else 0]:
        layer.register_forward_hook(add)


def set_tower_angles(tower: torch.nn.Module) -> None:
    """Makes the angles of the tower anew, in float32: a change of number format rounds them too,
    and an empty tower has none."""
    device = next(tower.parameters()).device
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(tower.config).to(device)


def embed(model: Any, token_ids: Tensor, images: PlacedImages | None) -> Tensor:
    """``[tokens, 1, hidden]``: embeddings, with features in the places of image tokens.

    Under sequence parallelism they are put in place before the cut over tensor ranks: its backward
    then gives every rank the gradient of all features, and no rank's tower learns from a part.
    Features for the first layers stand ready in ``model.deep_features``, in their places as well.
    """
    states = model.embedding(input_ids=token_ids, position_ids=None)
    deep: list[Tensor] = []
    if images is not None:
        features = _features(model.visual, images, model.pg_collection.tp)
        rows = features.to(states.dtype).index_select(0, images.source)
        first, *more = rows[:, None].split(states.shape[-1], dim=-1)
        zeros = torch.zeros_like(states)
        deep = [zeros.index_put((images.places,), each) for each in more]
        states = states.index_put((images.places,), first)
    elif torch.is_grad_enabled() and next(model.visual.parameters()).requires_grad:
        # Overlapped reduction waits for a gradient of every parameter in every last micro-batch.
        states = states + _black_image(model.visual).to(states.dtype).sum() * 0
    if model.config.sequence_parallel:
        states, *deep = (scatter_to_sequence_parallel_region(each) for each in (states, *deep))
    model.deep_features = deep
    return states


def _features(tower: Any, images: PlacedImages, group: dist.ProcessGroup) -> Tensor:
    """``_encoded``, ``[features, width]``, of all images; each tensor rank encodes a part."""
    shares = image_shares(images.grids, group.size())
    share = shares[group.rank()]
    if share.start == share.stop:  # its parameters get a gradient all the same, of zeros
        own = _black_image(tower)[:0]
    else:
        own = _encoded(tower, images.pixels(share), images.grids[share])
    if len(shares) == 1:
        return own
    counts = images.grids.prod(1) // tower.spatial_merge_size**2
    gathered = _GatheredRows.apply(own, [int(counts[each].sum()) for each in shares], group)
    assert isinstance(gathered, Tensor)
    return gathered


def image_shares(grids: Int[Tensor, "images 3"], parts: int) -> list[slice]:
    """Neighboring images for each of ``parts``, of about as many patches; some may have none."""
    patches = grids.prod(1)
    middles = patches.cumsum(0) - patches / 2
    owners = (middles * parts / patches.sum()).long()
    starts = torch.searchsorted(owners, torch.arange(parts + 1)).tolist()
    return [slice(start, stop) for start, stop in zip(starts[:-1], starts[1:], strict=True)]


class _GatheredRows(torch.autograd.Function):
    """Rows of all tensor ranks, one rank's after another's; ``counts``: of each rank.

    The gradient of all rows is whole on every rank, so that each takes its own part. Of the
    tower's parameters a rank then has the gradient of its images alone, of which megatron takes
    the mean over the ranks (``average_gradients_across_tp_domain``): hence times their number.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.num_ranks = len(counts)
        ctx.own = slice(sum(counts[: group.rank()]), sum(counts[: group.rank() + 1]))
        longest = max(counts)
        padded = rows.new_zeros(longest, rows.shape[1])
        padded[: len(rows)] = rows
        found = rows.new_empty(len(counts) * longest, rows.shape[1])
        dist.all_gather_into_tensor(found, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(found.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own] * ctx.num_ranks, None, None


def _black_image(tower: Any) -> Tensor:
    """The feature of one token's worth of zeros."""
    merge = tower.spatial_merge_size
    weight = tower.patch_embed.proj.weight
    pixels = weight.new_zeros(merge * merge, weight[0].numel())
    return _encoded(tower, pixels, torch.tensor([[1, merge, merge]]))


def _encoded(tower: Any, pixels: Tensor, grids: Int[Tensor, "images 3"]) -> Tensor:
    """``[features, width]``: those of the end, beside them those for the first layers, if any."""
    found = tower(pixels, grid_thw=grids)
    return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=1)
