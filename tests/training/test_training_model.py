"""The contract of a layered model, and the transformer that meets it."""

import pytest
import torch
from torch import nn

from triton_ext.errors import PlanningError, TritonExtError
from triton_ext.training import model
from triton_ext.training.transformer import transformer
from triton_ext.user_code import name_values

TRANSFORMER = "triton_ext.training.transformer:transformer"
SMALL = {"width": 16, "blocks": 2, "heads": 2, "sequence": 8, "vocabulary": 32}


class Squares(nn.Module):
    """A model without the method `shard`."""

    def __init__(self, transposed=False):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Flatten(0) if transposed else nn.Linear(4, 2)])

    def batch(self, samples, seed):
        return torch.randn(samples, 4), torch.randn(samples, 2)

    def loss(self, output, target):
        return (output - target).square().sum()


def test_the_transformer_learns():
    net = transformer(**SMALL)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = []
    for step in range(30):
        inputs, targets = net.batch(8, step)
        loss = net.loss(net(inputs), targets) / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_the_same_arguments_give_the_same_weights_and_batches():
    first, second = transformer(**SMALL), transformer(**SMALL)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(first.batch(3, 7)[0], second.batch(3, 7)[0])
    assert not torch.equal(first.batch(3, 7)[0], first.batch(3, 8)[0])


def test_losses_of_parts_of_a_batch_add_up():
    net = transformer(**SMALL)
    inputs, targets = net.batch(6, 0)
    parts = sum(net.loss(net(inputs[a:b]), targets[a:b]) for a, b in ((0, 1), (1, 4), (4, 6)))
    torch.testing.assert_close(parts, net.loss(net(inputs), targets))


def test_boundaries_are_the_shapes_between_layers_and_compute_nothing():
    shapes = model.boundaries(transformer(**SMALL), 3)
    assert [tuple(value.shape) for value in shapes] == [(3, 8), (3, 8, 16), (3, 8, 16), (3, 8, 16), (3, 8, 32)]
    assert all(value.is_meta for value in shapes)


def test_a_layer_that_does_not_keep_the_samples_is_named():
    with pytest.raises(PlanningError, match=r"layer 1 of Squares gives a tensor of shape \(12,\)"):
        model.boundaries(Squares(transposed=True), 3)


def test_a_model_is_loaded_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from triton_ext.training.transformer import transformer\n"
        "def make(width=16):\n    return transformer(width, 1, 2, 8, 32)\n"
        "def other():\n    return 3\n"
        "def needs(width, **options):\n    return transformer(width, heads=2, sequence=8, vocabulary=32, **options)\n"
    )
    assert len(model.load(f"{path}:make", {"width": 32}).layers) == 3
    with pytest.raises(PlanningError, match="takes no argument 'depth'; it takes width"):
        model.load(f"{path}:make", {"depth": 3})
    with pytest.raises(PlanningError, match="missing a required argument: 'width'; it takes width, options"):
        model.load(f"{path}:needs", {"depth": 3})
    assert len(model.load(f"{path}:needs", {"width": 32, "blocks": 2}).layers) == 4
    with pytest.raises(PlanningError, match="a int that is no layered model"):
        model.load(f"{path}:other", {})
    with pytest.raises(PlanningError, match="has no function 'nothing'"):
        model.load(f"{path}:nothing", {})


@pytest.mark.parametrize(
    ("location", "message"),
    [("nowhere.py:f", "no such file"), ("no_such_module_here:f", "neither"), ("file.py", "FILE:FUNCTION")],
)
def test_a_model_that_cannot_be_found(location, message):
    with pytest.raises(PlanningError, match=message):
        model.load(location, {})


def test_wrong_dimensions_are_named():
    with pytest.raises(PlanningError, match="width 16 with 3 heads"):
        transformer(width=16, heads=3)


def test_a_model_without_shard_is_for_one_device():
    with pytest.raises(PlanningError, match="a tensor-parallel degree of 2"):
        model.shardable(Squares(), 2)


def test_arguments_are_python_values_or_texts():
    assert name_values(["a=1", "b=2.5", "c=word"]) == {"a": 1, "b": 2.5, "c": "word"}
    with pytest.raises(TritonExtError, match="NAME=VALUE"):
        name_values(["width"])
    with pytest.raises(TritonExtError, match=r"a literal without a value: unhashable"):
        name_values(["w={[]:1}"])
