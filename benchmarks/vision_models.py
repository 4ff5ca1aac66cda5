"""Networks for images in torch, with the hyperparameters of their papers and random weights. `MODELS[name](**sizes)` builds one
in evaluation mode; tests pass small sizes.

Weights have the scale that keeps activations near 1, and the statistics of batch norms are random, so that a wrong scale, bias or
order of channels shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rounded(channels: float, by: int = 8) -> int:
    """Channels times a width, as a multiple of `by`, and at most a tenth less."""
    out = max(by, int(channels + by / 2) // by * by)
    return out + by if out < 0.9 * channels else out


class Conv(nn.Sequential):
    """A convolution without bias that keeps height and width (divided by the stride), batch norm, and an activation."""

    def __init__(
        self, inside: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU
    ) -> None:
        conv = nn.Conv2d(inside, out, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out), *([act()] if act else []))


# -- ResNet ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """x, or a 1 × 1 convolution of it, plus a chain of convolutions of which the last has no activation."""

    def __init__(self, inside: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = width * 4 if bottleneck else width
        if bottleneck:
            self.chain = nn.Sequential(Conv(inside, width), Conv(width, width, 3, stride), Conv(width, out, act=None))
        else:
            self.chain = nn.Sequential(Conv(inside, width, 3, stride), Conv(width, out, 3, act=None))
        self.short = Conv(inside, out, 1, stride, act=None) if stride > 1 or inside != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.chain(x) + self.short(x))


def resnet(blocks: Sequence[int], bottleneck: bool, width: int = 64, classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [Conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inside = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            own = width << stage
            layers.append(Residual(inside, own, 2 if stage and not i else 1, bottleneck))
            inside = own * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def resnet18(blocks: Sequence[int] = (2, 2, 2, 2), **sizes: int) -> nn.Module:
    return resnet(blocks, False, **sizes)


def resnet50(blocks: Sequence[int] = (3, 4, 6, 3), **sizes: int) -> nn.Module:
    return resnet(blocks, True, **sizes)


# -- MobileNets and EfficientNet -------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Channels scaled by a small network of their means."""

    def __init__(self, channels: int, inner: int, act: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), act(), nn.Conv2d(inner, channels, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


class Inverted(nn.Module):
    """The block of MobileNets: wider by a 1 × 1 convolution, one convolution per channel, narrower; plus x where dims agree."""

    def __init__(
        self, inside: int, inner: int, out: int, kernel: int, stride: int, act: type[nn.Module], squeeze: nn.Module | None = None
    ) -> None:
        super().__init__()
        wider = [Conv(inside, inner, act=act)] if inner != inside else []
        middle = [Conv(inner, inner, kernel, stride, inner, act), *([squeeze] if squeeze else [])]
        self.chain = nn.Sequential(*wider, *middle, Conv(inner, out, act=None))
        self.keeps = stride == 1 and inside == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.chain(x) if self.keeps else self.chain(x)


def _classifier(body: Sequence[nn.Module], *head: nn.Module) -> nn.Module:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


def mobilenet_v2(width: float = 1.0, classes: int = 1000, stages: int = 7) -> nn.Module:
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    inside, last = rounded(32 * width), rounded(1280 * max(1.0, width)) if width >= 0.5 else rounded(1280 * width)
    body: list[nn.Module] = [Conv(3, inside, 3, 2, act=nn.ReLU6)]
    for factor, channels, count, stride in table[:stages]:
        for i in range(count):
            out = rounded(channels * width)
            body.append(Inverted(inside, inside * factor, out, 3, 1 if i else stride, nn.ReLU6))
            inside = out
    return _classifier([*body, Conv(inside, last, act=nn.ReLU6)], nn.Linear(last, classes))


# kernel, inner channels, channels, squeezed, hard swish, stride
_V3_LARGE = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1), (5, 960, 160, 1, 1, 1),
)  # fmt: skip


def mobilenet_v3(width: float = 1.0, classes: int = 1000, blocks: int = 15) -> nn.Module:
    inside = rounded(16 * width)
    body: list[nn.Module] = [Conv(3, inside, 3, 2, act=nn.Hardswish)]
    inner = inside
    for kernel, wide, channels, squeezed, swish, stride in _V3_LARGE[:blocks]:
        inner, out = rounded(wide * width), rounded(channels * width)
        squeeze = Squeeze(inner, rounded(inner / 4), nn.ReLU, nn.Hardsigmoid) if squeezed else None
        body.append(Inverted(inside, inner, out, kernel, stride, nn.Hardswish if swish else nn.ReLU, squeeze))
        inside = out
    last = rounded(1280 * width)
    head = (nn.Linear(inner, last), nn.Hardswish(), nn.Linear(last, classes))
    return _classifier([*body, Conv(inside, inner, act=nn.Hardswish)], *head)


def efficientnet_b0(width: float = 1.0, classes: int = 1000, stages: int = 7) -> nn.Module:
    table = (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )  # fmt: skip
    inside, last = rounded(32 * width), rounded(1280 * width)
    body: list[nn.Module] = [Conv(3, inside, 3, 2, act=nn.SiLU)]
    for factor, kernel, stride, channels, count in table[:stages]:
        for i in range(count):
            inner, out = inside * factor, rounded(channels * width)
            squeeze = Squeeze(inner, max(1, inside // 4), nn.SiLU, nn.Sigmoid)
            body.append(Inverted(inside, inner, out, kernel, 1 if i else stride, nn.SiLU, squeeze))
            inside = out
    return _classifier([*body, Conv(inside, last, act=nn.SiLU)], nn.Linear(last, classes))


# -- ConvNeXt and ViT ------------------------------------------------------------------------------------------------


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [batch, channels, height, width]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 7, padding=3, groups=channels), nn.LayerNorm(channels, eps=1e-6)
        self.wider, self.narrower = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.narrower(F.gelu(self.wider(y))) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext_tiny(blocks: Sequence[int] = (3, 3, 9, 3), width: int = 96, classes: int = 1000) -> nn.Module:
    body: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
    for stage, count in enumerate(blocks):
        own = width << stage
        if stage:
            body += [ChannelNorm(own // 2, eps=1e-6), nn.Conv2d(own // 2, own, 2, 2)]
        body += [ConvNeXtBlock(own) for _ in range(count)]
    last = width << (len(blocks) - 1)
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(last, eps=1e-6), nn.Linear(last, classes))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.before(x)).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(split[0], split[1], split[2])
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrower(F.gelu(self.wider(self.between(x))))


class ViT(nn.Module):
    """A vision transformer with a class token and learned positions."""

    def __init__(
        self, width: int = 768, layers: int = 12, heads: int = 12, patch: int = 16, size: int = 224, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(EncoderLayer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


# -- U-Net and a detector --------------------------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self, width: int = 64, levels: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << i for i in range(levels + 1)]
        pair = lambda inside, out: nn.Sequential(Conv(inside, out, 3), Conv(out, out, 3))  # noqa: E731
        self.down = nn.ModuleList([pair(3, width), *(pair(a, b) for a, b in zip(widths, widths[1:]))])
        self.wider = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:])])
        self.up = nn.ModuleList([pair(2 * w, w) for w in widths[:-1]])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for i, pair in enumerate(self.down):
            x = pair(F.max_pool2d(x, 2) if i else x)
            seen.append(x)
        for wider, pair, beside in zip(reversed(self.wider), reversed(self.up), reversed(seen[:-1])):
            x = pair(torch.cat([beside, wider(x)], 1))
        return self.head(x)


class Stage(nn.Module):
    """Half of the channels through a chain of residual 3 × 3 pairs; every intermediate result is concatenated."""

    def __init__(self, inside: int, out: int, count: int, adds: bool = True) -> None:
        super().__init__()
        half = out // 2
        self.first, self.last, self.adds = Conv(inside, out, act=nn.SiLU), Conv(half * (2 + count), out, act=nn.SiLU), adds
        pair = lambda: nn.Sequential(Conv(half, half, 3, act=nn.SiLU), Conv(half, half, 3, act=nn.SiLU))  # noqa: E731
        self.pairs = nn.ModuleList([pair() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for pair in self.pairs:
            parts.append(parts[-1] + pair(parts[-1]) if self.adds else pair(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Pyramid(nn.Module):
    """Maxima over windows of 5, 9 and 13, concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = Conv(channels, channels // 2, act=nn.SiLU), Conv(channels * 2, channels, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """In the style of YOLO: boxes [batch, places, 4] as left, top, right, bottom in pixels, and scores of the classes."""

    def __init__(self, width: int = 16, classes: int = 80, count: int = 1) -> None:
        super().__init__()
        w = [width << i for i in range(5)]
        down = lambda a, b: Conv(a, b, 3, 2, act=nn.SiLU)  # noqa: E731
        self.classes = classes
        self.stem = nn.Sequential(down(3, w[0]), down(w[0], w[1]), Stage(w[1], w[1], count))
        self.third = nn.Sequential(down(w[1], w[2]), Stage(w[2], w[2], 2 * count))
        self.fourth = nn.Sequential(down(w[2], w[3]), Stage(w[3], w[3], 2 * count))
        self.fifth = nn.Sequential(down(w[3], w[4]), Stage(w[4], w[4], count), Pyramid(w[4]))
        self.up4, self.up3 = Stage(w[4] + w[3], w[3], count, False), Stage(w[3] + w[2], w[2], count, False)
        self.down4, self.out4 = down(w[2], w[2]), Stage(w[2] + w[3], w[3], count, False)
        head = lambda c: nn.Sequential(Conv(c, c, 3, act=nn.SiLU), nn.Conv2d(c, 4 + classes, 1))  # noqa: E731
        self.heads = nn.ModuleList([head(w[2]), head(w[3]), head(w[4])])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        third = self.third(self.stem(x))
        fourth = self.fourth(third)
        fifth = self.fifth(fourth)
        four = self.up4(torch.cat([F.interpolate(fifth, scale_factor=2.0, mode="nearest"), fourth], 1))
        three = self.up3(torch.cat([F.interpolate(four, scale_factor=2.0, mode="nearest"), third], 1))
        levels = (three, self.out4(torch.cat([self.down4(three), four], 1)), fifth)
        boxes, scores = [], []
        for scale, level, head in zip((8, 16, 32), levels, self.heads):
            found = head(level).flatten(2).transpose(1, 2)
            height, width = level.shape[2:]
            y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
            centre = torch.stack([x, y], -1).reshape(-1, 2)
            reach = F.softplus(found[..., :4])
            boxes.append(torch.cat([centre - reach[..., :2], centre + reach[..., 2:]], -1) * scale)
            scores.append(torch.sigmoid(found[..., 4:]))
        return torch.cat(boxes, 1), torch.cat(scores, 1)


# -- building --------------------------------------------------------------------------------------------------------

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "mobilenet-v2": mobilenet_v2,
    "mobilenet-v3": mobilenet_v3,
    "efficientnet-b0": efficientnet_b0,
    "convnext-tiny": convnext_tiny,
    "vit-b16": ViT,
    "unet": UNet,
    "detector": Detector,
}


def settle(network: nn.Module) -> nn.Module:
    """Random statistics and weights, in evaluation mode. Each batch norm gets a scale that keeps its result near 1."""
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            for own, low, high in ((part.running_mean, -0.2, 0.2), (part.bias, -0.2, 0.2), (part.weight, 0.7, 1.1)):
                nn.init.uniform_(own, low, high)  # type: ignore[arg-type]
            nn.init.uniform_(part.running_var, 0.5, 1.5)  # type: ignore[arg-type]
        elif isinstance(part, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            nn.init.kaiming_normal_(part.weight, nonlinearity="linear" if isinstance(part, nn.ConvTranspose2d) else "relu")
            if part.bias is not None:
                nn.init.uniform_(part.bias, -0.2, 0.2)
    for block in network.modules():
        if isinstance(block, Residual) or getattr(block, "keeps", False):  # the sum of many blocks stays near 1 too
            block.chain[-1][1].weight.data *= 0.3  # type: ignore[index, union-attr]
    return network.eval()


def _build(builder: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def build(**sizes: object) -> nn.Module:
        torch.manual_seed(0)
        return settle(builder(**sizes))

    return build


MODELS: dict[str, Callable[..., nn.Module]] = {name: _build(builder) for name, builder in _BUILDERS.items()}
SMALL: dict[str, tuple[dict[str, object], int]] = {  # sizes for tests, and the height and width of their images
    "resnet18": ({"width": 8, "blocks": (1, 1, 1, 1), "classes": 10}, 49),
    "resnet50": ({"width": 8, "blocks": (1, 2), "classes": 10}, 45),
    "mobilenet-v2": ({"width": 0.25, "stages": 4, "classes": 10}, 48),
    "mobilenet-v3": ({"width": 0.25, "blocks": 6, "classes": 10}, 48),
    "efficientnet-b0": ({"width": 0.25, "stages": 3, "classes": 10}, 48),
    "convnext-tiny": ({"width": 12, "blocks": (1, 2), "classes": 10}, 48),
    "vit-b16": ({"width": 24, "layers": 2, "heads": 3, "patch": 8, "size": 32, "classes": 10}, 32),
    "unet": ({"width": 8, "levels": 2, "classes": 3}, 36),
    "detector": ({"width": 8, "classes": 5}, 64),
}
__all__ = ["MODELS", "SMALL"]
