"""What LoRA adapters add to a layer's passes, and frozen weights take away. `chunks` asks.

An adapter of rank r beside a matrix of n × k is two products so thin that moving their operands takes the time:

    forward            x is read for A (k), and the output read and written once more to add B's product (2 n)
    gradient of x      the output's gradient is read for B (n), and x's read and written once more (2 k)
    of the adapter     both are read again (n + k)

Like everything between large products, it is counted as ideal fusion would move it, times the software's passes
(how much more kernels really move: Zhu et al. 2025, LoRAFusion).
"""

from cumulo.plan.memory.states import has_adapter
from cumulo.plan.time.compute import LayerWork, Passes, Seconds, add, rates
from cumulo.plan.time.compute_profile import Profile
from cumulo.spec.device import Device
from cumulo.spec.model import ModelSpec
from cumulo.spec.operations import layer_operations


def with_adapters(
    plain: Passes,
    model: ModelSpec,
    moe: bool,
    targets: tuple[str, ...],
    work: LayerWork,
    profile: Profile,
    device: Device,
) -> Passes:
    """A layer whose matrices are frozen, with an adapter beside each that is one of `targets`."""
    rate = rates(profile, device)
    inputs = outputs = 0.0  # numbers of one token that the products read and write
    for operation in layer_operations(model, moe):
        product = operation.product
        if product is not None and has_adapter(operation.name, targets):
            inputs += product.choices * product.inputs / (work.tensor if product.sliced == "inputs" else 1)
            outputs += product.choices * product.outputs / (work.tensor if product.sliced == "outputs" else 1)
    number_s = work.tokens * rate.number_bytes * rate.elementwise_byte_s
    moved = Passes(
        Seconds(elementwise=number_s * (inputs + 2 * outputs)),
        Seconds(elementwise=number_s * (outputs + 2 * inputs)),
        Seconds(elementwise=number_s * (outputs + inputs)),
    )
    return Passes(
        add(plain.forward, moved.forward),
        add(plain.backward_input, moved.backward_input),
        moved.backward_weight._replace(launch=plain.backward_weight.launch),
    )


def frozen(end: Passes) -> Passes:
    """The embedding or the head: no gradient of its weights."""
    return Passes(end.forward, end.backward_input, Seconds())
