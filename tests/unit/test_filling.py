"""Filling a module: every parameter from the arena, ties kept, buffers untouched; or names and no change at all."""

import weakref

import pytest
import torch
from torch import nn

from weightcache.engine import filling
from weightcache.wire import reasons


class Model(nn.Module):
    """An embedding, a layer, a head that may be tied to the embedding, and a rotary table of the engine's own."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.rotary: torch.Tensor
        self.register_buffer("rotary", torch.arange(8.0))


def weights(**changes):
    """Tensors that fit the untied model, each of another value."""
    shapes = {"embed.weight": (6, 4), "layer.weight": (4, 4), "layer.bias": (4,), "head.weight": (6, 4)}
    made = {name: torch.full(shape, float(number)) for number, (name, shape) in enumerate(shapes.items())}
    return {name: tensor for name, tensor in {**made, **changes}.items() if tensor is not None}


def snapshot(module):
    """Which object each name has."""
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}


def refusal_of(module, tensors, aliases=None):
    """The refusal, after checking that not a single parameter was exchanged."""
    before = snapshot(module)
    with pytest.raises(reasons.Refusal) as caught:
        filling.fill(module, tensors, aliases)
    assert caught.value.reason is reasons.Reason.WeightsDoNotFit
    assert snapshot(module) == before
    return caught.value.message


def test_every_parameter_is_the_tensor_itself():
    """No copy: the parameter's memory is the arena's."""
    model, tensors = Model(), weights()
    filling.fill(model, tensors)
    found = dict(model.named_parameters())
    assert {name: parameter.data_ptr() for name, parameter in found.items()} == {
        name: tensor.data_ptr() for name, tensor in tensors.items()
    }
    assert not any(parameter.requires_grad for parameter in found.values())


def test_the_filled_model_computes_with_the_tensors():
    """What counts in the end: the same numbers as by hand."""
    model, tensors = Model(), weights()
    filling.fill(model, tensors)
    wanted = tensors["embed.weight"][2] @ tensors["layer.weight"].T + tensors["layer.bias"]
    assert torch.equal(model.layer(model.embed(torch.tensor(2))), wanted)


def test_a_model_built_on_meta_has_no_parameter_left_there():
    """Nothing stays without memory, and nothing is filled with memory of its own (answers W22)."""
    with filling.meta_parameters():
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    filling.fill(model, weights())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_missing_tensor_is_an_error_with_its_name():
    """One tensor left out by a daemon must not become uninitialised memory (answers W22)."""
    message = refusal_of(Model(), weights(**{"layer.bias": None}))
    assert "1 parameters of the module have no tensor: layer.bias" in message


def test_an_extra_tensor_is_an_error_with_its_name():
    """A tensor that nobody uses means that the model is another one."""
    assert "1 tensors have no parameter in the module: layer.scale" in refusal_of(
        Model(), weights(**{"layer.scale": torch.ones(1)})
    )


def test_a_tensor_for_a_buffer_is_refused_and_told_so():
    """A rotary table of the daemon's length must not replace the engine's longer one (answers W17)."""
    assert "rotary (a buffer of the module" in refusal_of(Model(), weights(rotary=torch.zeros(2)))


def test_buffers_are_untouched():
    """They belong to the engine: same object, same values (answers W17)."""
    model = Model()
    before = model.rotary
    filling.fill(model, weights())
    assert model.rotary is before and before.tolist() == list(range(8))


def test_another_shape_or_dtype_is_an_error_with_both_values():
    """Expert parallelism at one end only gives other shapes under equal names (answers W4)."""
    changes = {"layer.weight": torch.ones(4, 2), "layer.bias": torch.ones(4, dtype=torch.bfloat16)}
    message = refusal_of(Model(), weights(**changes))
    assert "layer.weight (module float32 [4, 4], arena float32 [4, 2])" in message
    assert "layer.bias (module float32 [4], arena bfloat16 [4])" in message


def test_all_faults_are_told_at_once_and_their_number_is_bounded():
    """Ten names show the pattern; ten thousand would hide it."""
    model = nn.Module()
    for index in range(300):
        model.register_parameter(f"p{index:03}", nn.Parameter(torch.zeros(1)))
    message = refusal_of(model, {"q": torch.zeros(1)})
    assert "300 parameters of the module have no tensor: p000, " in message
    assert "and 290 more" in message and "1 tensors have no parameter in the module: q" in message
    assert len(message) < 400


def test_names_tied_by_the_arena_share_one_parameter():
    """The module ties after loading: both names must be one object already (answers W21)."""
    model = Model()
    filling.fill(model, weights(**{"head.weight": None}), aliases={"head.weight": "embed.weight"})
    assert model.head.weight is model.embed.weight


def test_names_tied_by_the_module_stay_tied():
    """The arena has the tensor once, under either name (answers W21)."""
    for absent in ("head.weight", "embed.weight"):
        model = Model(tied=True)
        tensors = weights(**{absent: None})
        filling.fill(model, tensors)
        assert model.head.weight is model.embed.weight
        assert (
            model.head.weight.data_ptr() == next(t for n, t in tensors.items() if n.startswith(("h", "e"))).data_ptr()
        )


def test_names_tied_by_the_module_but_not_by_the_arena_are_refused():
    """Choosing one of two tensors would drop the other without a word (answers W21)."""
    assert "head.weight (tied in the module, a tensor of its own in the arena)" in refusal_of(
        Model(tied=True), weights()
    )


def test_names_tied_while_building_on_meta_stay_tied():
    """Also where the first object is registered twice, not read back from the module (answers W21)."""
    shared = nn.Parameter(torch.zeros(2))
    with filling.meta_parameters():
        left, right = nn.Module(), nn.Module()
        left.register_parameter("w", shared)
        right.w = shared
    assert left.w.is_meta and left.w is right.w


def test_meta_parameters_keep_their_class_and_attributes():
    """Engines hang their weight loaders on parameters, and ask for their classes."""

    class Loaded(nn.Parameter):
        def __new__(cls, data, loader):
            return super().__new__(cls, data, requires_grad=False)

        def __init__(self, data, loader):
            self.loader = loader

    with filling.meta_parameters():
        module = nn.Module()
        module.register_parameter("w", Loaded(torch.zeros(2, dtype=torch.bfloat16), loader=print))
    assert type(module.w) is Loaded and module.w.loader is print and not module.w.requires_grad
    assert module.w.is_meta and module.w.dtype == torch.bfloat16 and module.w.shape == (2,)


def test_buffers_stay_real_while_parameters_go_to_meta():
    """A rotary table on meta is a crash at its first use, or a wrong answer (answers W16, W17)."""
    with filling.meta_parameters():
        model = Model()
    assert model.rotary.tolist() == list(range(8))


def test_a_parameter_that_went_to_meta_gives_its_memory_back_at_once():
    """Peak memory is one parameter, not the model."""
    parameter = nn.Parameter(torch.zeros(2))
    gone = weakref.ref(parameter)
    with filling.meta_parameters():
        module = nn.Module()
        module.register_parameter("w", parameter)
        del parameter
        assert gone() is None
    assert module.w.is_meta


def test_after_the_context_and_after_an_error_in_it_parameters_are_real_again():
    """A hook left behind would empty the next model of the process."""
    with pytest.raises(KeyError), filling.meta_parameters():
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta


def test_shared_submodules_are_filled_once():
    """One submodule under two names: one parameter under two names."""
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2, bias=False)
    tensor = torch.ones(2, 2)
    filling.fill(model, {"a.weight": tensor}, aliases={"b.weight": "a.weight"})
    assert model.a.weight.data_ptr() == model.b.weight.data_ptr() == tensor.data_ptr()
