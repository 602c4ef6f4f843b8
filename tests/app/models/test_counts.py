"""The paper's networks have the nodes and weights of its tables, and as many channels as they are built with."""

import pytest
import torch
from torch import Tensor, nn

from rlsprune.app.models import FNN, MiniVGG, ResNet
from rlsprune.app.run.counting import count_retained, percent, total
from rlsprune.model.counts import weight_count

# Nodes, weights, channels.
FNN_LAYERS = {"input": (784, 0, 784), "fc1": (1024, 802816, 1024), "fc2": (512, 524288, 512), "fc3": (10, 5120, 10)}
VGG_LAYERS = {
    "input": (3072, 0, 3),
    "conv1": (65536, 1728, 64),
    "conv2": (65536, 36864, 64),
    "conv3": (32768, 73728, 128),
    "conv4": (32768, 147456, 128),
    "conv5": (16384, 294912, 256),
    "fc1": (1024, 4194304, 1024),
    "fc2": (10, 10240, 10),
}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_fnn_has_the_columns_n_and_w_of_table_1(batch_norm: bool) -> None:
    counts = count_retained(FNN(batch_norm=batch_norm), torch.zeros(1, 784))
    assert counts == FNN_LAYERS
    assert total(counts)[:2] == (2330, 1332224)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_mini_vgg_has_the_columns_n_and_w_of_tables_2_and_3(batch_norm: bool) -> None:
    counts = count_retained(MiniVGG(batch_norm=batch_norm), torch.zeros(1, 3, 32, 32))
    assert counts == VGG_LAYERS
    assert total(counts)[:2] == (217098, 4759232)


def test_counting_leaves_the_network_as_it_was() -> None:
    model = FNN((6, 4, 2), batch_norm=True).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count_retained(model, torch.ones(3, 6))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.modules())


def test_zeros_count_only_if_asked_for() -> None:
    model = FNN((4, 3, 2))
    with torch.no_grad():
        model.get_parameter("fc1.weight")[0, :2] = 0
    example = torch.zeros(1, 4)
    assert count_retained(model, example)["fc1"].weights == 12
    assert count_retained(model, example, zeros=False)["fc1"].weights == 10


def test_percentage_of_nothing_is_zero() -> None:
    assert percent(1, 4) == 25.0
    assert percent(0, 0) == 0.0


@pytest.mark.parametrize("build", [lambda: FNN((784,)), lambda: MiniVGG(image_size=30)])
def test_sizes_that_make_no_network_are_refused(build: object) -> None:
    with pytest.raises(ValueError, match="is not valid"):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (56, 0.85), (110, 1.7)])
def test_resnets_have_the_parameters_of_their_paper(depth: int, millions: float) -> None:
    model = ResNet(depth)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_resnet_of_a_depth_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="depth=21"):
        ResNet(21)


class Tagger(nn.Module):
    """An embedding, a recurrent layer and a one-dimensional convolution: all of them have weights that count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(30, 8), nn.LSTM(8, 16, batch_first=True)
        self.convolution, self.head = nn.Conv1d(16, 5, 3), nn.Linear(5, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.recurrent(self.embedding(tokens))[0]
        return self.head(self.convolution(states.mT).amax(-1))


def test_layers_of_every_kind_count() -> None:
    model = Tagger()
    counts = count_retained(model, torch.zeros(1, 9, dtype=torch.long))
    assert {name: count.weights for name, count in counts.items()} == {
        "input": 0,
        "embedding": 30 * 8,
        "recurrent": 4 * 16 * (8 + 16),
        "convolution": 5 * 16 * 3,
        "head": 10,
    }
    assert [count.channels for count in counts.values()] == [9, 8, 16, 5, 2]
    assert total(counts).weights == weight_count(model)
