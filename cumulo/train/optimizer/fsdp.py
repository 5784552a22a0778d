"""FullySharded: ZeRO 2 and 3 by torch's FSDP2, layer by layer. A `GradientSink`.

Between steps a rank holds only its rows of each parameter. Gathered weights stay from forward to backward under
ZeRO 2 and are dropped in between under ZeRO 3. Gradients are added up over a step's micro-batches and summed over
ranks once, during the last backward. With `layout.shard` rows are shared inside a part of the data-parallel ranks
and copied over the rest (hybrid sharding); experts are shared out among those that hold the same ones.

With float32 master weights the shared-out rows are the masters, and what is gathered is their half-precision copy.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from cumulo.layout.pieces import Piece, zero_rows
from cumulo.models.moe import Experts
from cumulo.ranks.collectives import Work, all_gather, all_reduce, reduce_scatter, start_all_gather
from cumulo.ranks.groups import Group, Groups
from cumulo.train.optimizer.data_parallel import Zero1
from cumulo.train.optimizer.sink import FsdpPrefetch, RestGroups, Shard, layers_of


class GatherThroughDoor(AllGather):
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        if async_op:
            return start_all_gather(output_tensor, input_tensor, group)
        all_gather(output_tensor, input_tensor, group)
        return None


class ScatterThroughDoor(ReduceScatter):
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, op: Any, async_op: bool = False
    ) -> Work | None:
        """Reduces by sums: `FullySharded` asks for no other."""
        reduce_scatter(output_tensor, input_tensor, group)
        return None


class FullySharded:
    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        pieces: Mapping[str, Piece],
        groups: Groups,
        wide_gradients: bool,
        device: torch.device,
        prefetch: FsdpPrefetch = "pre",
    ) -> None:
        """What of `chunks` is on the meta device gets memory on `device`, once it is cut, and no values.
        `prefetch`: a layer's weights are gathered while the layer before it computes, or after."""
        self._prefetch, self._on_cpu = prefetch, device.type == "cpu"
        self._chunks, self._groups, self._rest = chunks, groups, RestGroups(pieces, groups)
        self._reshard = groups.layout.zero == 3
        # FSDP2 takes no parameter that two of its roots share, such as a tied embedding of the first and the last
        # chunk; and a selection bias is steered as a whole. Both stay whole, with their optimizer state shared out.
        _allocate(chunks, _outside(chunks), device)
        outside = _outside(chunks)
        self._others = Zero1(outside, pieces, groups, wide_gradients)
        self._mesh, self._expert_mesh = _mesh(groups, device.type), _expert_mesh(groups, device.type)
        self._leaves: dict[int, dict[nn.Parameter, None]] = {chunk: {} for chunk in chunks}
        self._sharded: dict[str, DTensor] = {}
        dtypes: dict[str, torch.dtype] = {}
        for chunk, module in chunks.items():
            dtypes |= {name: parameter.dtype for name, parameter in module.named_parameters()}
            ignored = set(outside[chunk].values())
            self._shard(module, ignored, wide_gradients)
            module._apply(
                lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
            )
            self._watch(chunk, module)
            for name, parameter in module.named_parameters():
                if isinstance(parameter, DTensor):
                    self._sharded[name] = parameter
        self.shards: dict[str, Shard] = {
            name: self._own_rows(parameter, pieces[name], dtypes[name])
            for name, parameter in self._sharded.items()
        } | self._others.shards

    def begin(self) -> None:
        self._others.begin()
        for parameter in self._sharded.values():
            parameter.grad = None
        for module in self._chunks.values():
            _set_last(module, False, self._reshard)

    def leaves(self, chunk: int) -> Iterator[nn.Parameter]:
        return iter(self._leaves[chunk])

    def last(self, chunk: int) -> None:
        self._others.last(chunk)
        _set_last(self._chunks[chunk], True, True)

    def added(self, chunk: int) -> None:
        """The hooks have seen them."""

    def finish(self) -> dict[str, Tensor]:
        for module in self._chunks.values():
            _set_last(module, True, True)
            # Where weight gradients are computed apart from the input's, no hook of a layer's input runs behind
            # them; torch.distributed.pipelining ends its steps like this, too. Nothing is done twice.
            _as_fsdp(module)._get_fsdp_state()._root_post_backward_final_callback()
        found: dict[str, Tensor] = {}
        for name, parameter in self._sharded.items():
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            assert isinstance(gradient, DTensor | None)
            own = self.shards[name].tensor
            found[name] = torch.zeros_like(own) if gradient is None else gradient.to_local()
        self._sum_rest(found)
        return found | self._others.finish()

    def spread(self, frozen: bool = False) -> None:
        """Gathered weights are dropped: the next forward gathers the new ones."""
        for module in self._chunks.values():
            for layer in _fsdp_modules(module):
                layer.reshard()
        self._others.spread(frozen)

    # -- sharding ------------------------------------------------------------------------------------------
    def _shard(self, module: nn.Module, ignored: set[nn.Parameter], wide: bool) -> None:
        dtype = next((p.dtype for p in module.parameters() if p.requires_grad), None)
        policy = MixedPrecisionPolicy()
        if wide and dtype in (torch.bfloat16, torch.float16):
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for part, mesh in self._parts(module):
            if policy.param_dtype is not None:
                _widen(part, ignored)
            fully_shard(
                part, mesh=mesh, reshard_after_forward=self._reshard, mp_policy=policy, ignored_params=ignored
            )
        layers = list(layers_of(module))
        if self._prefetch == "pre":
            for layer, following in itertools.pairwise(layers):
                _as_fsdp(layer).set_modules_to_forward_prefetch([_as_fsdp(following)])
        for sharded in _fsdp_modules(module):
            if self._prefetch == "post":
                sharded.set_modules_to_backward_prefetch(
                    [sharded]
                )  # its own are there: nothing is fetched early
            if self._on_cpu:
                # There are no streams: weights are gathered by other threads, through the door that times them.
                sharded._set_unshard_async_op(True)
                sharded.set_custom_all_gather(GatherThroughDoor())
                sharded.set_custom_reduce_scatter(ScatterThroughDoor())
        for sharded in _fsdp_modules(module):
            sharded.set_gradient_divide_factor(1.0)  # sums, not means
            sharded.set_force_sum_reduction_for_comms(True)

    def _parts(self, module: nn.Module) -> Iterator[tuple[nn.Module, DeviceMesh]]:
        """What is gathered together, from the inside out: a layer's experts, the rest of it, the rest."""
        for layer in layers_of(module):
            for part in layer.modules():
                if isinstance(part, Experts):
                    yield part, self._expert_mesh
            yield layer, self._mesh
        yield module, self._mesh

    def _own_rows(self, parameter: DTensor, piece: Piece, dtype: torch.dtype) -> Shard:
        axis = piece.zero_axis
        begin, end = zero_rows(piece.shape[0], self._groups.size(axis), self._groups.index(axis))
        holders = len(piece.holders) // self._groups.size(axis)
        own = parameter.to_local().detach()
        return Shard(own, piece, begin, end, holders, parameter.requires_grad, dtype)

    def _watch(self, chunk: int, module: nn.Module) -> None:
        """Note the gathered parameters at the first forward: FSDP2 takes them off the modules behind it."""

        def note(part: nn.Module, args: object) -> None:
            handles.pop(part).remove()
            gathered = (p for p in part.parameters() if not isinstance(p, DTensor))
            self._leaves[chunk] |= dict.fromkeys(gathered)

        handles: dict[nn.Module, RemovableHandle] = {
            part: part.register_forward_pre_hook(note)  # behind FSDP2's own, which gathers
            for part in module.modules()
            if isinstance(part, FSDPModule)
        }

    # -- gradients -----------------------------------------------------------------------------------------
    def _sum_rest(self, gradients: dict[str, Tensor]) -> None:
        """Over tensor-parallel ranks and copies on other stages, with one message per group."""
        together: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(gradients):  # the same order on all stages
            together.setdefault(self._rest.members[name], []).append(name)
        for names in together.values():
            group = self._rest.group(names[0])
            if group is None:
                continue
            parts = [gradients[name] for name in names]
            flat = torch.cat([part.flatten() for part in parts])
            all_reduce(flat, group)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view(part.shape))


def _outside(chunks: Mapping[int, nn.Module]) -> dict[int, dict[str, nn.Parameter]]:
    """Each chunk's parameters that FSDP2 leaves alone."""
    named = {chunk: dict(module.named_parameters()) for chunk, module in chunks.items()}
    homes: dict[str, int] = {}
    for own in named.values():
        for name in own:
            homes[name] = homes.get(name, 0) + 1
    return {
        chunk: {name: p for name, p in own.items() if homes[name] > 1 or name.endswith("selection_bias")}
        for chunk, own in named.items()
    }


def _allocate(
    chunks: Mapping[int, nn.Module], outside: Mapping[int, Mapping[str, nn.Parameter]], device: torch.device
) -> None:
    """Memory for what stays whole: one tensor for all chunks that have it."""
    made: dict[str, nn.Parameter] = {}
    for chunk, named in outside.items():
        for name, parameter in named.items():
            if not parameter.is_meta:
                continue
            if name not in made:
                whole = torch.empty_like(parameter, device=device)
                made[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            path, _, last = name.rpartition(".")
            setattr(chunks[chunk].get_submodule(path), last, made[name])


def _mesh(groups: Groups, device_type: str) -> DeviceMesh:
    if groups.size("copies") == 1:
        return DeviceMesh.from_group(groups.group("shard"), device_type, mesh_dim_names=("shard",))
    ranks = [groups.layout.group("shard", rank) for rank in groups.members("copies")]
    return DeviceMesh.from_group(
        [groups.group("copies"), groups.group("shard")],
        device_type,
        mesh=torch.tensor(ranks),
        mesh_dim_names=("copies", "shard"),
    )


def _expert_mesh(groups: Groups, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(groups.group("expert_data"), device_type, mesh_dim_names=("expert_data",))


def _widen(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """In place: what is trained and not yet sharded becomes float32."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter not in ignored and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.float()


def _fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def _as_fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _set_last(module: nn.Module, last: bool, reshard: bool) -> None:
    root = _as_fsdp(module)
    root.set_is_last_backward(last)
    root.set_requires_gradient_sync(last)
    root.set_reshard_after_backward(reshard)
