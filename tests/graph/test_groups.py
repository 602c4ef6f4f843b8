"""What belongs to a group, what is left alone and why."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from rlsprune.graph import find_groups
from rlsprune.model.selector import select_inputs
from zoo import ZOO, evaluate, remove, some_units, zeroed_output


class Custom(nn.Module):
    """Modules by name and a forward given as a function of them and the inputs."""

    def __init__(self, forward, **modules: nn.Module) -> None:
        super().__init__()
        self.steps = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.steps(self, *args, **kwargs)


def roles(graph, name: str) -> tuple[list[str], list[str], list[str]]:
    group = graph[name]
    return tuple([member.name for member in part] for part in (group.producers, group.carriers, group.consumers))


def test_members_of_a_residual_stage_and_of_a_depthwise_block() -> None:
    specimen = ZOO["mobilenet"]
    graph = find_groups(specimen.model(), specimen.inputs())
    assert roles(graph, "blocks.0.expand.0") == (
        ["blocks.0.expand.0"],
        ["blocks.0.expand.1", "blocks.0.depthwise.0", "blocks.0.depthwise.1"],
        ["blocks.0.project.0"],
    )
    assert roles(graph, "stem.0") == (
        ["stem.0", "blocks.0.project.0"],
        ["stem.1", "blocks.0.project.1"],
        ["blocks.0.expand.0", "blocks.1.expand.0"],
    )


def test_index_of_flatten_concat_grouped_and_gated_layers() -> None:
    def index(name: str, group: str, part: str) -> dict[str, list[list[int]]]:
        graph = find_groups(ZOO[name].model(), ZOO[name].inputs())
        return {member.name: member.index.tolist() for member in getattr(graph[group], part)}

    assert index("vgg", "0.5", "consumers") == {"2.0": [list(range(4 * c, 4 * c + 4)) for c in range(12)]}
    assert index("unet", "down1", "consumers")["merge"] == [[7 + c] for c in range(6)]
    # Three groups of four channels: a unit is the channel at one offset of each.
    grouped = index("resnext", "blocks.0.conv1", "consumers")
    assert grouped == {"blocks.0.conv2": [[c, c + 4, c + 8] for c in range(4)]}
    assert index("gated", "conv", "producers") == {"conv": [[c, c + 6] for c in range(6)]}
    assert index("gated", "conv", "carriers") == {"scale": [[c] for c in range(6)]}
    assert index("group-norm", "0", "carriers") == {"1": [[3 * g, 3 * g + 1, 3 * g + 2] for g in range(4)]}


def test_a_group_that_there_is_not() -> None:
    graph = find_groups(ZOO["fnn"].model(), ZOO["fnn"].inputs())
    with pytest.raises(KeyError, match="no group 'x'; there are input, 1, 3"):
        graph["x"]


class TestInputs:
    def test_flattened_image_and_sequence_features(self) -> None:
        model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 2))
        for shape in [(3, 7), (3, 4, 7)]:
            group = find_groups(model, torch.randn(shape))["input"]
            assert group.is_input
            assert (group.size, group.producers, [m.name for m in group.consumers]) == (7, (), ["0"])

    def test_two_readers_share_a_group_and_inputs_are_named(self) -> None:
        model = Custom(
            lambda self, x, z: self.a(x).relu() + self.b(x).relu() + self.c(z).relu(),
            a=nn.Linear(6, 4), b=nn.Linear(6, 4), c=nn.Linear(3, 4),
        )  # fmt: skip
        graph = find_groups(model, {"x": torch.randn(2, 6), "z": torch.randn(2, 3)})
        assert {g.name: (g.size, [m.name for m in g.consumers]) for g in graph if g.is_input} == {
            "input[x]": (6, ["a", "b"]),
            "input[z]": (3, ["c"]),
        }
        assert [g.name for g in find_groups(model, (torch.randn(2, 6), torch.randn(2, 3)))] == ["input[0]", "input[1]"]

    def test_layer_that_picks_the_features_it_kept(self) -> None:
        model, kept = ZOO["fnn"].model(), [0, 3, 4, 9]
        select_inputs(model[1], kept)
        model[1].weight.data, model[1].in_features = model[1].weight.data[:, kept], len(kept)
        graph = find_groups(model, ZOO["fnn"].inputs())
        assert [(group.name, group.size) for group in graph] == [("input", 4), ("1", 12), ("3", 10)]

    def test_image_channels_make_no_group(self) -> None:
        graph = find_groups(ZOO["vgg"].model(), ZOO["vgg"].inputs())
        assert not any(group.is_input for group in graph)
        assert "input" not in graph.skipped

    @pytest.mark.parametrize(
        ("forward", "reason"),
        [
            (lambda self, x: self.b(self.a(x) + x), "besides linear layers, add reads"),
            (lambda self, x: self.b(torch.cat([self.a(x)[:, :3], x[:, :3]], 1)), "besides linear layers, __getitem__"),
            (lambda self, x: (self.b(self.a(x)), x), "besides linear layers, the network's output"),
            (lambda self, x: self.b(self.a(self.a(x).relu())), "a reads other things too"),
        ],
    )
    def test_input_that_something_else_reads_is_reported(self, forward, reason: str) -> None:
        graph = find_groups(Custom(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2)), torch.randn(2, 6))
        assert not any(group.is_input for group in graph)
        assert reason in graph.skipped["input"]

    def test_network_that_takes_one_number_of_its_input(self) -> None:
        forward = lambda self, x: self.b(self.a((x - x.mean()) / x.std()).relu())  # noqa: E731
        graph = find_groups(Custom(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 2)), torch.randn(2, 6))
        assert [group.name for group in graph] == ["a"]


class TestLeftAlone:
    def test_ignored_layer_keeps_what_it_makes_but_not_what_it_reads(self) -> None:
        specimen = ZOO["vgg"]
        graph = find_groups(specimen.model(), specimen.inputs(), ignore=["0.2"])
        assert [group.name for group in graph] == ["0.0", "0.5", "2.0"]
        assert graph.skipped["0.2"] == "0.2 is named in ignore"
        graph = find_groups(specimen.model(), specimen.inputs(), ignore=["0"])
        assert [group.name for group in graph] == ["2.0"]

    def test_ignored_input(self) -> None:
        graph = find_groups(ZOO["fnn"].model(), ZOO["fnn"].inputs(), ignore=["input"])
        assert [group.name for group in graph] == ["1", "3"]
        assert "ignore" in graph.skipped["input"]

    @pytest.mark.parametrize(
        "wrap",
        [
            parametrizations.weight_norm,
            parametrizations.spectral_norm,
            lambda layer: prune.random_unstructured(layer, "weight", amount=0.3),
        ],
    )
    def test_parametrised_layers(self, wrap) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), wrap(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 2))
        graph = find_groups(model, torch.randn(2, 4))
        assert [group.name for group in graph] == ["input"]
        assert all("2 cannot be cut: its weight is parametrised" in graph.skipped[name] for name in ("0", "2"))

    def test_every_returned_tensor_is_an_output(self) -> None:
        model = Custom(
            lambda self, x: {"middle": (h := self.a(x)), "last": self.c(self.b(h.relu()).relu())},
            a=nn.Linear(4, 6), b=nn.Linear(6, 5), c=nn.Linear(5, 2),
        )  # fmt: skip
        graph = find_groups(model, torch.randn(2, 4), ignore=["input"])
        assert [group.name for group in graph] == ["b"]
        assert graph.skipped["a"] == graph.skipped["c"] == "its channels reach the network's output"

    def test_attention_and_recurrent_layers(self) -> None:
        model = Custom(
            lambda self, x: self.out(self.attend(*[self.embed(x)] * 3)[0].mean(1)),
            embed=nn.Linear(6, 8), attend=nn.MultiheadAttention(8, 2, batch_first=True), out=nn.Linear(8, 2),
        )  # fmt: skip
        graph = find_groups(model, torch.randn(2, 5, 6))
        heads = ["attend[heads]", "attend[keys]", "attend[values]"]
        assert [group.name for group in graph] == ["input", *heads, "attend.out_proj"]
        assert "attend multiplies it with a parameter" in graph.skipped["embed"]
        assert type(model.attend) is nn.MultiheadAttention, "the network was not left as it was"
        model = Custom(
            lambda self, x: self.out(self.cell(self.embed(x))[0].mean(1)),
            embed=nn.Linear(6, 8), cell=nn.LSTM(8, 8, batch_first=True), out=nn.Linear(8, 2),
        )  # fmt: skip
        graph = find_groups(model, torch.randn(2, 5, 6))
        assert [group.name for group in graph] == ["input", "embed", "cell"]

    def test_zero_initialised_weights_hide_no_mistake(self) -> None:
        model = ZOO["channel-softmax"].model()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        graph = find_groups(model, torch.zeros(1, 3, 8, 8))
        assert [group.name for group in graph] == ["mix"]

    def test_output_that_is_not_finite_proves_nothing(self) -> None:
        model = Custom(lambda self, x: self.b(self.a(x).relu()) / 0, a=nn.Linear(4, 6), b=nn.Linear(6, 2))
        graph = find_groups(model, torch.randn(2, 4))
        assert not len(graph)
        assert all("not finite" in graph.skipped[name] for name in ("input", "a"))

    def test_mixing_of_channels_between_the_layers(self) -> None:
        """A gate made from the mean over all channels changes when one of them goes."""
        model = Custom(
            lambda self, x: self.b((h := self.a(x).relu()) * h.mean(1, keepdim=True)),
            a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1),
        )  # fmt: skip
        graph = find_groups(model, torch.randn(2, 3, 4, 4))
        assert len(graph) == 0
        assert graph.skipped["a"] == "the network mixes all of its channels (mean)"

    def test_halves_that_lose_unequally(self) -> None:
        """Two layers joined, normalised and taken apart at half the width: right only while both lose equally many."""

        def forward(self, x):
            both = self.norm(torch.cat([self.a(x), self.b(x)], 1))
            half = both.shape[1] // 2
            return self.d(both[:, half:]) + self.c(both[:, :half])

        model = Custom(
            forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(8), c=nn.Conv2d(4, 2, 1),
            d=nn.Conv2d(4, 2, 1),
        )  # fmt: skip
        graph = find_groups(model, torch.randn(2, 3, 4, 4))
        assert len(graph) == 0
        assert {"a", "b"} <= set(graph.skipped)

    def test_width_that_is_written_into_the_forward(self) -> None:
        model = Custom(
            lambda self, x: self.b(self.a(x).view(-1, 2, 4).relu().flatten(1)),
            a=nn.Linear(4, 8),
            b=nn.Linear(8, 2),
        )
        graph = find_groups(model, torch.randn(2, 4))
        assert [group.name for group in graph] == ["input"]
        assert "does not run without some of its channels" in graph.skipped["a"]


class TestPrunable:
    """Oddities that are no obstacle: found, and exact when pruned."""

    @pytest.mark.parametrize(
        ("between", "groups"),
        [
            (lambda h: nn.functional.pixel_shuffle(h, 2), {"a": 2}),
            (lambda h: nn.functional.pixel_unshuffle(h, 2), {"a": 8}),
            (lambda h: nn.functional.channel_shuffle(h, 2), {"a": 4}),
            (lambda h: nn.functional.pad(h, (0, 0, 0, 0, 2, 0)), {"a": 8}),
            (lambda h: nn.functional.pad(h, (1, 1, 1, 1)), {"a": 8}),
            (lambda h: nn.functional.pad(h, (1, 0, 0, 2, 2, 1), value=0.5), {"a": 8}),
            (lambda h: nn.functional.pad(h, (-1, 2, 0, -1)), {"a": 8}),
            (lambda h: h.unflatten(1, (2, -1)).sum(1), {"a": 4}),
            (lambda h: nn.functional.glu(h, 1), {"a": 4}),
            (lambda h: h.flip(1).roll(3, 2), {"a": 8}),
            (lambda h: h.movedim(1, -1).reshape(4, -1, h.shape[1]).permute(0, 2, 1).unsqueeze(-1), {"a": 8}),
        ],
    )
    def test_functions_that_move_channels(self, between, groups: dict[str, int]) -> None:
        torch.manual_seed(0)
        width = between(torch.zeros(2, 8, 4, 4)).shape[1]
        model = Custom(lambda self, x: self.b(between(self.a(x))), a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(width, 2, 1))
        self.check(model, torch.randn(2, 3, 4, 4), groups)

    def test_forward_without_gradients(self) -> None:
        torch.manual_seed(0)
        forward = torch.no_grad()(lambda self, x: self.b(self.a(x).relu()))
        self.check(Custom(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 2)), torch.randn(2, 5), {"a": 6})

    def check(self, model: nn.Module, x: Tensor, groups: dict[str, int]) -> None:
        graph = find_groups(model, x)
        assert {group.name: group.size for group in graph if not group.is_input} == groups, graph.skipped
        chosen = [(group, units) for group, units in some_units(graph) if not group.is_input]
        expected = zeroed_output(model, chosen, x)
        remove(model, graph, chosen)
        torch.testing.assert_close(evaluate(model, x), expected, rtol=1e-5, atol=1e-5)

    def test_frozen_layers(self) -> None:
        model = ZOO["vgg-bn"].model().requires_grad_(False)
        self.check(model, ZOO["vgg-bn"].inputs(), ZOO["vgg-bn"].groups)
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_tied_weights_are_cut_once(self) -> None:
        torch.manual_seed(0)
        model = Custom(
            lambda self, x: self.out(self.a(x).sigmoid() * self.b(x.flip(-1)).sigmoid()),
            a=nn.Linear(4, 6), b=nn.Linear(4, 6), out=nn.Linear(6, 2),
        )  # fmt: skip
        model.b.weight = model.a.weight
        self.check(model, torch.randn(3, 4), {"a": 6})
        assert model.b.weight is model.a.weight
        assert model.a.weight.shape == (4, 4)

    def test_tied_weights_with_separate_readers_go_together(self) -> None:
        torch.manual_seed(0)
        model = Custom(
            lambda self, x: self.c(self.a(x).relu()) + self.d(self.b(x.flip(-1)).relu()),
            a=nn.Linear(4, 6), b=nn.Linear(4, 6), c=nn.Linear(6, 2), d=nn.Linear(6, 2),
        )  # fmt: skip
        model.b.weight = model.a.weight
        self.check(model, torch.randn(3, 4), {"a": 6})

    def test_module_called_twice(self) -> None:
        torch.manual_seed(0)
        model = Custom(
            lambda self, x: self.out(self.mix(self.mix(self.a(x).sigmoid()).sigmoid())),
            a=nn.Linear(4, 6), mix=nn.Linear(6, 6), out=nn.Linear(6, 2),
        )  # fmt: skip
        self.check(model, torch.randn(3, 4), {"a": 6})

    def test_network_that_insists_on_single_precision(self) -> None:
        torch.manual_seed(0)
        model = Custom(lambda self, x: self.b(self.a(x.float()).sigmoid()), a=nn.Linear(4, 6), b=nn.Linear(6, 2))
        self.check(model, torch.randn(3, 4), {"a": 6})

    def test_unbatched_input(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 2, 1))
        graph = find_groups(model, torch.randn(3, 5, 5))
        assert [(group.name, group.size) for group in graph] == [("0", 6)]

    def test_embedding(self) -> None:
        torch.manual_seed(0)
        model = Custom(lambda self, x: self.out(self.embed(x).mean(1)), embed=nn.Embedding(9, 6), out=nn.Linear(6, 2))
        self.check(model, torch.randint(0, 9, (3, 5)), {"embed": 6})

    def test_grouped_transposed_convolution(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, 2, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1)
        )
        self.check(model, torch.randn(2, 3, 6, 6), {"0": 4, "2": 3})

    def test_model_that_is_a_bare_layer_has_only_inputs(self) -> None:
        graph = find_groups(nn.Linear(5, 3), torch.randn(2, 5))
        assert [(group.name, group.size) for group in graph] == [("input", 5)]
        assert set(graph.skipped) == {""}


class TestErrors:
    def test_wrong_shape_names_it_and_the_models_own_words(self) -> None:
        with pytest.raises(ValueError, match=r"example_inputs of shape \(2, 3\): RuntimeError: mat1 and mat2"):
            find_groups(nn.Linear(5, 3), torch.randn(2, 3))

    def test_wrappers(self) -> None:
        inner = ZOO["fnn"].model()
        with pytest.raises(ValueError, match=r"wrapped in DataParallel: pass the inner module \(.module\)"):
            find_groups(nn.DataParallel(inner), ZOO["fnn"].inputs())
        with pytest.raises(ValueError, match=r"compiled \(OptimizedModule\): pass the inner module \(._orig_mod\)"):
            find_groups(torch.compile(inner), ZOO["fnn"].inputs())
        with pytest.raises(ValueError, match="run the model once"):
            find_groups(nn.Sequential(nn.LazyLinear(3)), torch.randn(2, 5))

    def test_unknown_name_to_ignore(self) -> None:
        with pytest.raises(
            ValueError, match="ignore names 'stm', which is no module of the model: did you mean 'stem'"
        ):
            find_groups(ZOO["inception"].model(), ZOO["inception"].inputs(), ignore=["stm"])
        with pytest.raises(ValueError, match=r"write \['stem'\]"):
            find_groups(ZOO["inception"].model(), ZOO["inception"].inputs(), ignore="stem")


class TestNoTrace:
    def test_everything_is_left_as_it_was(self) -> None:
        model = ZOO["vgg-bn"].model().train()
        model[0][1].eval()
        model[0][3].weight.requires_grad_(False)
        model[2][0].weight.grad = torch.ones_like(model[2][0].weight)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        flags = [
            (module.training, len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()
        ]
        grads = [parameter.requires_grad for parameter in model.parameters()]
        random = torch.get_rng_state()
        with torch.no_grad():
            find_groups(model, ZOO["vgg-bn"].inputs())
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert grads == [parameter.requires_grad for parameter in model.parameters()]
        assert flags == [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        assert torch.equal(model[2][0].weight.grad, torch.ones_like(model[2][0].weight))

    def test_buffer_that_a_forward_counts_in_and_a_failed_trace(self) -> None:
        def forward(self, x):
            self.count += 1
            self.norm(torch.randn(4, 6))
            if self.count > 1:
                raise RuntimeError("second call")
            return self.a(x)

        model = Custom(forward, a=nn.Linear(6, 3), norm=nn.BatchNorm1d(6))
        model.register_buffer("count", torch.zeros(()))
        graph = find_groups(model, torch.randn(2, 6))
        assert (
            "does not run a second time, so nothing can be verified (RuntimeError: second call)"
            in graph.skipped["input"]
        )
        assert model.count == 0
        assert model.norm.num_batches_tracked == 0
        assert model.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_importing_the_graph_does_not_import_torch_pruning() -> None:
    code = "import sys, rlsprune.graph; sys.exit('torch_pruning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_channel_that_one_layer_reads_flattened_and_averaged() -> None:
    def forward(m: Custom, x: Tensor) -> Tensor:
        b = m.b(x).relu()
        return m.head(torch.cat([(m.e(x) + b).flatten(1), b.mean((2, 3))], 1))

    layers = {"b": nn.Conv2d(3, 8, 3, padding=1), "e": nn.Conv2d(3, 8, 1), "head": nn.Linear(8 * 16 + 8, 10)}
    graph = find_groups(Custom(forward, **layers), torch.rand(2, 3, 4, 4))
    (head,) = graph["b"].consumers
    assert head.index.tolist() == [[*range(16 * c, 16 * c + 16), 128 + c] for c in range(8)]


@pytest.mark.parametrize("first", [True, False])
def test_features_read_by_a_weight_that_reads_something_else_too_are_left_alone(first: bool) -> None:
    """Cutting the weight for the input would cut it for the hidden layer as well."""
    a, b = nn.Linear(20, 20), nn.Linear(20, 20)
    if first:
        b.weight = a.weight
    else:
        a.weight = b.weight
    model = nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), nn.Linear(20, 3))
    graph = find_groups(model, torch.rand(1, 20))
    assert "input" not in [group.name for group in graph]
    assert "shares its weight with" in graph.skipped["input"]


def test_a_weight_that_the_forward_uses_elsewhere_keeps_its_inputs() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = torch.relu(net.a(x))
        return net.b(nn.functional.linear(hidden, net.a.weight.t())) + net.d(net.c(x))

    layers = {"a": nn.Linear(6, 9, bias=False), "b": nn.Linear(6, 2), "c": nn.Linear(6, 5), "d": nn.Linear(5, 2)}
    graph = find_groups(Custom(forward, **layers), torch.rand(2, 6))
    assert "the network does not run without some of its features" in graph.skipped["input"]
    assert [group.name for group in graph] == ["c"]
