"""Models to which no formula of the memory estimate was fitted: layers, optimizers and precisions of other kinds."""

import itertools

import torch
from memory_models import Trained
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint


class Classifier(Trained):
    def loss(self, outputs, targets):
        return cross_entropy(outputs, targets)


class Lstm(Classifier):
    """Two layers that are one module, over words, by SGD with momentum: no list of blocks."""

    batch_size = 16

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3000, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 20)

    def forward(self, tokens):
        states, _ = self.lstm(self.embed(tokens))
        return self.head(states[:, -1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    @staticmethod
    def batch(size):
        return torch.randint(3000, (size, 24)), torch.randint(20, (size,))


class Gru(Classifier):
    """Layers in a list, whose results are tuples, by RMSprop."""

    batch_size = 24

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(a, 224, batch_first=True) for a, _ in itertools.pairwise([64, *[224] * 4]))
        self.head = nn.Linear(224, 300)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x.mean(1))

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)

    @staticmethod
    def batch(size):
        return torch.randn(size, 16, 64), torch.randint(300, (size,))


def double_conv(before, after):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(Trained):
    """Activations of the way down wait for the way up; by Adagrad."""

    batch_size = 6

    def __init__(self):
        super().__init__()
        widths = [16, 32, 64, 128]
        self.stem = double_conv(3, widths[0])
        self.down = nn.ModuleList(double_conv(a, b) for a, b in itertools.pairwise(widths))
        upward = list(itertools.pairwise(reversed(widths)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in upward)
        self.up = nn.ModuleList(double_conv(2 * b, b) for _, b in upward)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x):
        x = self.stem(x)
        skipped = []
        for block in self.down:
            skipped.append(x)
            x = block(nn.functional.max_pool2d(x, 2))
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat([enlarge(x), skipped.pop()], 1))
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=1e-3)

    @staticmethod
    def batch(size):
        return torch.randn(size, 3, 48, 48), torch.randn(size, 2, 48, 48)


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norm2(x))


class Mixer(Classifier):
    """Adam with amsgrad has three tensors of state."""

    batch_size = 16

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, stride=4)
        self.blocks = nn.ModuleList(MixerBlock(64, 128) for _ in range(6))
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 100)
        self.tensor_parallel_plan = {
            "blocks.*.across.0": "colwise", "blocks.*.across.2": "rowwise",
            "blocks.*.along.0": "colwise", "blocks.*.along.2": "rowwise",
        }  # fmt: skip

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, amsgrad=True)

    @staticmethod
    def batch(size):
        return torch.randn(size, 3, 32, 32), torch.randint(100, (size,))


class MixedMixer(Mixer):
    """The same under autocast: weights are cast for each product."""

    precision = "bf16-mixed"


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, memory, *, causal):
        parts = (
            layer(each).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer, each in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        return self.out(scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class GptBlock(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = Attention(width, 8), SwiGLU(width, inner)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        normed = self.norm1(x)
        x = x + self.dropout(self.attention(normed, normed, causal=True))
        return x + self.dropout(self.mlp(self.norm2(x)))


def attention_plan(*prefixes):
    return {f"{prefix}.{name}": "colwise" for prefix in prefixes for name in ("query", "key", "value")} | {
        f"{prefix}.out": "rowwise" for prefix in prefixes
    }


class Gpt(Trained):
    """Blocks of two widths, gates, dropout, and two groups of parameters."""

    batch_size = 6
    vocabulary = 1500

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(self.vocabulary, 160), nn.Parameter(torch.zeros(96, 160))
        self.blocks = nn.ModuleList(GptBlock(160, inner) for inner in (320, 640, 960, 320, 640))
        self.norm = RMSNorm(160)
        self.head = nn.Linear(160, self.vocabulary, bias=False)
        self.tensor_parallel_plan = attention_plan("blocks.*.attention") | {
            "blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise",
        }  # fmt: skip

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, outputs, targets):
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        rest = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)

    @classmethod
    def batch(cls, size):
        return torch.randint(cls.vocabulary, (size, 96)), torch.randint(cls.vocabulary, (size, 96))


class HalfGpt(Gpt):
    """Everything is of two bytes."""

    precision = "bf16-true"


class MixedGpt(Gpt):
    precision = "bf16-mixed"


class RecomputingGpt(Gpt):
    """The model itself recomputes its blocks, as many files of models do."""

    batch_size = 16

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class ExpertBlock(nn.Module):
    """All experts compute, each weighted by the router: a list of layers in an element of one."""

    def __init__(self, width, experts):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1)
        return x + sum(expert(normed) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))


class Experts(Trained):
    batch_size = 96

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ExpertBlock(160, 4) for _ in range(3))
        self.head = nn.Linear(160, 160)
        self.tensor_parallel_plan = {"blocks.*.experts.*.0": "colwise", "blocks.*.experts.*.2": "rowwise"}

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @staticmethod
    def batch(size):
        return torch.randn(size, 160), torch.randn(size, 160)


class Vit(Classifier):
    """torch's own encoder layers, with parameters that are in no layer; by SGD with Nesterov's momentum."""

    batch_size = 12

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 144, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 144)), nn.Parameter(torch.zeros(1, 65, 144))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(144, 6, 576, dropout=0.1, batch_first=True, norm_first=True) for _ in range(5)
        )
        self.head = nn.Sequential(nn.LayerNorm(144), nn.Linear(144, 50))
        self.tensor_parallel_plan = {"blocks.*.linear1": "colwise", "blocks.*.linear2": "rowwise"}

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, nesterov=True)

    @staticmethod
    def batch(size):
        return torch.randn(size, 3, 32, 32), torch.randint(50, (size,))


class Buffers(Trained):
    """Most of it is a fixed projection; a mean of what came by is written to in each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("projection", torch.randn(512, 2048))
        self.register_buffer("mean", torch.zeros(64, 2048))
        self.layers = nn.Sequential(nn.Linear(2048, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))

    def forward(self, x):
        features = (x @ self.projection).cos()
        with torch.no_grad():
            self.mean.lerp_(features, 0.1)
        return self.layers(features - self.mean)

    @staticmethod
    def batch(size):
        return torch.randn(size, 512), torch.randn(size, 64)


class Frozen(Trained):
    """The first half is not trained, and keeps nothing for the backward."""

    batch_size = 256

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(320, 320), nn.SiLU()) for _ in range(12))
        for layer in self.layers[:6]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def configure_optimizers(self):
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-3)

    @staticmethod
    def batch(size):
        return torch.randn(size, 320), torch.randn(size, 320)


class EncoderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, causal=False)
        return x + self.down(gelu(self.up(self.norm2(x))))


class DecoderLayer(EncoderLayer):
    def __init__(self, width):
        super().__init__(width)
        self.norm3, self.cross = nn.LayerNorm(width), Attention(width, 4)

    def forward(self, x, memory):
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, causal=True)
        x = x + self.cross(self.norm3(x), memory, causal=False)
        return x + self.down(gelu(self.up(self.norm2(x))))


class Translation(Trained):
    """What the encoder gives is read by every layer of the decoder; its embedding is tied to the head."""

    batch_size = 6
    vocabulary = 1200

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, 144)
        self.encoder = nn.ModuleList(EncoderLayer(144) for _ in range(4))
        self.decoder = nn.ModuleList(DecoderLayer(144) for _ in range(3))
        self.head = nn.Linear(144, self.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.tensor_parallel_plan = attention_plan("encoder.*.attention", "decoder.*.attention", "decoder.*.cross") | {
            "encoder.*.up": "colwise", "encoder.*.down": "rowwise",
            "decoder.*.up": "colwise", "decoder.*.down": "rowwise",
        }  # fmt: skip

    def forward(self, source, target):
        memory, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        source, target, expected = batch
        return {"loss": cross_entropy(self(source, target).flatten(0, 1), expected.flatten())}

    @classmethod
    def batch(cls, size):
        return tuple(torch.randint(cls.vocabulary, (size, length)) for length in (80, 60, 60))


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.short = (
            nn.Sequential()
            if before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))
        )

    def forward(self, x):
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.short(x)
        return self.relu(out)


class ResNet(Classifier):
    """Operations in place, and most parameters in the last blocks; by Adam."""

    batch_size = 12

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
        self.stages = nn.Sequential(
            *(Residual(a, b, s) for a, b, s in ((24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 160, 2)))
        )
        self.head = nn.Linear(160, 10)

    def forward(self, images):
        return self.head(self.stages(self.stem(images)).mean((2, 3)))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    @staticmethod
    def batch(size):
        return torch.randn(size, 3, 32, 32), torch.randint(10, (size,))


class Repeating(Trained):
    """One block that is called six times, as ALBERT's; by Adamax."""

    batch_size = 10

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 256), nn.Linear(256, 64)
        self.blocks = nn.ModuleList([EncoderLayer(256), EncoderLayer(256)])
        self.tensor_parallel_plan = attention_plan("blocks.*.attention") | {
            "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
        }  # fmt: skip

    def forward(self, x):
        x = self.enter(x)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return self.leave(x)

    def configure_optimizers(self):
        return torch.optim.Adamax(self.parameters(), lr=1e-3)

    @staticmethod
    def batch(size):
        return torch.randn(size, 32, 64), torch.randn(size, 32, 64)


class LargeBuffers(Trained):
    """Little but buffers, of several dtypes."""

    batch_size = 32

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 512, 512))
        self.register_buffer("mask", torch.ones(512, 512, dtype=torch.bool))
        self.register_buffer("offsets", torch.zeros(1024, 512, dtype=torch.bfloat16))
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))

    def forward(self, x):
        x = self.layers(x)
        return x @ (self.table[0] * self.mask) + self.offsets[: len(x)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    @staticmethod
    def batch(size):
        return torch.randn(size, 512), torch.randn(size, 512)


class LargeBatch(Classifier):
    """Large images of which the first layer makes little."""

    batch_size = 16

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 96, 16, stride=16)
        self.layers = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images):
        return self.layers(self.patches(images).mean((2, 3)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    @staticmethod
    def batch(size):
        return torch.randn(size, 3, 256, 256), torch.randint(10, (size,))


class LargeHead(Trained):
    """Most parameters are in no block; what the step returns has more than the loss."""

    batch_size = 4
    vocabulary = 12000

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(self.vocabulary, 96)
        self.blocks = nn.ModuleList(GptBlock(96, 200) for _ in range(3))
        self.head = nn.Linear(96, self.vocabulary)
        self.tensor_parallel_plan = attention_plan("blocks.*.attention") | {
            "blocks.*.mlp.gate": "colwise", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise",
            "head": "colwise_rep",
        }  # fmt: skip

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        logits = self(tokens)
        return {"loss": cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits.detach()}

    def configure_optimizers(self):
        return torch.optim.NAdam(self.parameters(), lr=1e-3)

    @classmethod
    def batch(cls, size):
        return torch.randint(cls.vocabulary, (size, 40)), torch.randint(cls.vocabulary, (size, 40))


class Wave(Trained):
    """Gated dilated convolutions with skips, and many parameters of odd shapes; by AdamW, one tensor at a time."""

    batch_size = 6

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(1, 51, 1)
        self.gates = nn.ModuleList(nn.Conv1d(51, 102, 3, padding=2**i, dilation=2**i) for i in range(8))
        self.mixes = nn.ModuleList(nn.Conv1d(51, 102, 1) for _ in range(8))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(8))
        self.leave = nn.Sequential(nn.PReLU(), nn.Conv1d(51, 51, 1), nn.PReLU(), nn.Conv1d(51, 1, 1))

    def forward(self, x):
        x, total = self.enter(x), 0.0
        for gate, mix, scale in zip(self.gates, self.mixes, self.scales, strict=True):
            left, right = gate(x).chunk(2, 1)
            rest, skipped = mix(left.tanh() * right.sigmoid()).chunk(2, 1)
            x, total = x + scale * rest, total + skipped
        return self.leave(total + x)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)

    @staticmethod
    def batch(size):
        return torch.randn(size, 1, 1024), torch.randn(size, 1, 1024)


class Penalized(Trained):
    """The loss has the norm of a gradient in it, so the backward goes through a backward."""

    batch_size = 128

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 512), nn.Softplus(), nn.Linear(512, 512), nn.Softplus(), nn.Linear(512, 1)
        )

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        inputs = inputs.detach().requires_grad_()
        found = self(inputs)
        (slope,) = torch.autograd.grad(found.sum(), inputs, create_graph=True)
        return self.loss(found, targets) + (slope.norm(dim=1) - 1).pow(2).mean()

    @staticmethod
    def batch(size):
        return torch.randn(size, 256), torch.randn(size, 1)


class Fourier(Classifier):
    """Mixes tokens by complex transforms, as FNet; by Adadelta."""

    batch_size = 12

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(48, 192)
        self.blocks = nn.Sequential(*(FourierBlock(192) for _ in range(6)))
        self.head = nn.Linear(192, 30)

    def forward(self, x):
        return self.head(self.blocks(self.enter(x)).amax(1))

    def configure_optimizers(self):
        return torch.optim.Adadelta(self.parameters())

    @staticmethod
    def batch(size):
        return torch.randn(size, 64, 48), torch.randint(30, (size,))


class FourierBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(3 * width, width)
        )

    def forward(self, x):
        x = x + torch.fft.fft2(x).real
        return x + self.layers(self.norm(x))


HELD_OUT = {
    each.__name__: each
    for each in (
        Lstm, Gru, UNet, Mixer, MixedMixer, Gpt, HalfGpt, MixedGpt, RecomputingGpt, Experts, Vit, Buffers, Frozen,
        Translation, ResNet, Repeating, LargeBuffers, LargeBatch, LargeHead, Wave, Penalized, Fourier,
    )
}  # fmt: skip
