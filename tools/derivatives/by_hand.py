"""Cases that the samples of torch's database miss: losses, factorizations, ties, boundaries."""

import torch
from torch.nn import functional as F

from tools.derivatives.database_cases import OF_ONE, pairs
from tools.derivatives.judge import Case

F64 = torch.float64


def numbers(*values):
    return torch.tensor(values, dtype=F64)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


RESIDUALS = numbers(0, 1e-8, 0.25, -0.25, 0.5, -0.5, 1, -1, 1.5, 2, -2, 50)
PROBABILITIES = numbers(0, 1e-14, 1e-6, 0.25, 0.5, 0.75, 1)
LOGITS = numbers(0, 1e-8, 0.5, -0.5, 2, -2, 30, -30, 200, -200)
TARGETS = numbers(0, 0.25, 0.5, 1)
POSITIVE = numbers(1e-8, 1e-3, 0.5, 1, 2, 100)


def of_pairs(name, f, xs, ys=None):
    return Case(name, f, {"": pairs(xs, ys)}, by_entry=True)


def of_numbers(name, f, xs=OF_ONE):
    return Case(name, f, {"": (xs,)}, by_entry=True)


def focal(x, y):
    """The loss of torchvision's detectors."""
    p, loss = torch.sigmoid(x), F.binary_cross_entropy_with_logits(x, y, reduction="none")
    at = p * y + (1 - p) * (1 - y)
    return (0.25 * y + 0.75 * (1 - y)) * loss * (1 - at) ** 2


def preference(chosen, rejected):
    """DPO: of log probabilities, relative to those of a reference."""
    return -F.logsigmoid(0.1 * (chosen - rejected))


def losses():
    for beta in (0.0, 0.5, 1.0):
        smooth = lambda x, y, beta=beta: F.smooth_l1_loss(x, y, reduction="none", beta=beta)
        yield of_pairs(f"smooth_l1_loss, beta {beta}", smooth, RESIDUALS)
    for delta in (0.5, 1.0):
        huber = lambda x, y, delta=delta: F.huber_loss(x, y, reduction="none", delta=delta)
        yield of_pairs(f"huber_loss, delta {delta}", huber, RESIDUALS)
    of_residuals = {
        "mse_loss": F.mse_loss,
        "l1_loss": F.l1_loss,
        "hinge_embedding_loss": F.hinge_embedding_loss,
        "soft_margin_loss": F.soft_margin_loss,
    }
    for name, loss in of_residuals.items():
        yield of_pairs(name, lambda x, y, loss=loss: loss(x, y.sign(), reduction="none"), RESIDUALS)
    yield of_pairs(
        "margin_ranking_loss",
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x), 0.5, reduction="none"),
        RESIDUALS,
    )
    for logarithms in (False, True):
        poisson = lambda x, y, log=logarithms: F.poisson_nll_loss(
            x, y, log_input=log, full=True, reduction="none"
        )
        inputs = LOGITS[:-2] if logarithms else POSITIVE
        yield of_pairs(f"poisson_nll_loss, log_input={logarithms}", poisson, inputs, POSITIVE)
        divergence = lambda x, y, log=logarithms: F.kl_div(x, y, log_target=log, reduction="none")
        targets = LOGITS[:-2] if logarithms else PROBABILITIES
        yield of_pairs(f"kl_div, log_target={logarithms}", divergence, LOGITS[:-2], targets)
    yield of_pairs(
        "gaussian_nll_loss",
        lambda x, v: F.gaussian_nll_loss(x, 0.5 * torch.ones_like(x), v, reduction="none"),
        RESIDUALS,
        POSITIVE,
    )
    entropy = lambda x, y: F.binary_cross_entropy(x, y, reduction="none")
    yield of_pairs("binary_cross_entropy", entropy, PROBABILITIES, TARGETS)
    weighted = lambda x, y: F.binary_cross_entropy(x, y, weight=y + 0.5)
    yield of_pairs("binary_cross_entropy, weights", weighted, PROBABILITIES[3:-1], TARGETS)
    entropy = lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none")
    yield of_pairs("binary_cross_entropy_with_logits", entropy, LOGITS, TARGETS)
    positive = lambda x, y: F.binary_cross_entropy_with_logits(
        x, y, weight=2 * torch.ones_like(x), pos_weight=3 * torch.ones_like(x), reduction="none"
    )
    yield of_pairs("binary_cross_entropy_with_logits, weights", positive, LOGITS, TARGETS)
    yield of_pairs("focal loss", focal, LOGITS, TARGETS)
    yield of_pairs("DPO", preference, 10 * RESIDUALS)
    yield of_numbers("log(1 + exp(x)) of a square", lambda x: F.softplus(x * x), OF_ONE[:26])

    features, labels = drawn(6, 3), numbers(0, 1, 1, 0, 1, 0)
    regression = lambda w: F.binary_cross_entropy_with_logits(features @ w, labels)
    starts = {"zero": (numbers(0, 0, 0),), "drawn": (drawn(3),), "large": (1e3 * drawn(3),)}
    yield Case("logistic regression", regression, starts)
    classes = torch.tensor([0, 2, 1])
    scores = {
        "zero": (torch.zeros(3, 4, dtype=F64),),
        "drawn": (drawn(3, 4),),
        "whole numbers": (drawn(3, 4).round(),),
        "large": (1e3 * drawn(3, 4),),
    }
    of_scores = {
        "cross_entropy": lambda x: F.cross_entropy(x, classes, label_smoothing=0.1),
        "multi_margin_loss": lambda x: F.multi_margin_loss(x, classes),
        "multi_margin_loss, squares": lambda x: F.multi_margin_loss(x, classes, p=2),
        "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(
            x, torch.tensor([[0, 2, -1, 1], [3, 0, 1, -1], [-1, 0, 0, 0]])
        ),
        "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, (x > 0).double()),
        "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x.flip(0), x.flip(1)),
        "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x, x.flip(1), numbers(1, -1, 1)),
    }
    for name, f in of_scores.items():
        yield Case(f"{name}, by hand", f, scores)


def _of_eigenvalues(*values):
    q = torch.linalg.qr(drawn(len(values), len(values), seed=7)).Q
    return q @ torch.diag(numbers(*values)) @ q.T


SYMMETRIC = {
    "drawn": (drawn(3, 3) + drawn(3, 3).T,),
    "repeated eigenvalues": (_of_eigenvalues(1, 2, 2),),
    "opposite eigenvalues": (_of_eigenvalues(1, -1, 2),),
    "identity": (torch.eye(3, dtype=F64),),
    "zero": (torch.zeros(3, 3, dtype=F64),),
    "an eigenvalue of zero": (_of_eigenvalues(0, 1, 2),),
    "large": (1e4 * _of_eigenvalues(1, 2, 3),),
    "tiny": (1e-8 * _of_eigenvalues(1, 2, 3),),
}
DEFINITE = {name: SYMMETRIC[name] for name in ("repeated eigenvalues", "identity", "large", "tiny")}
SQUARE = {
    "drawn": (drawn(3, 3),),
    "repeated singular values": (2 * torch.linalg.qr(drawn(3, 3, seed=3)).Q,),
    "identity": (torch.eye(3, dtype=F64),),
    "diagonal": (torch.diag(numbers(1, 2, 2)),),
    "large": (1e4 * drawn(3, 3),),
    "tiny": (1e-8 * drawn(3, 3),),
}
SINGULAR = {
    "rank 2": (drawn(3, 2) @ drawn(2, 3),),
    "rank 1": (torch.ones(3, 3, dtype=F64),),
    "zero": (torch.zeros(3, 3, dtype=F64),),
}
TALL = {
    "drawn": (drawn(4, 3),),
    "repeated singular values": (2 * torch.linalg.qr(drawn(4, 3, seed=3)).Q,),
    "large": (1e4 * drawn(4, 3),),
    "tiny": (1e-8 * drawn(4, 3),),
}


def _symmetric(f):
    return lambda a: f((a + a.mT) / 2)


def linear_algebra():
    rhs = drawn(3, 2, seed=5)
    of_square = {
        "inv": torch.linalg.inv,
        "solve": lambda a: torch.linalg.solve(a, rhs),
        "solve of a vector": lambda a: torch.linalg.solve(a, rhs[:, 0]),
        "solve from the right": lambda a: torch.linalg.solve(a, rhs.T, left=False),
        "lu_solve": lambda a: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), rhs),
        "logdet": lambda a: torch.logdet(a @ a.T),
        "slogdet": lambda a: torch.linalg.slogdet(a).logabsdet,
        "lu": lambda a: torch.linalg.lu(a)[1:],
        "qr": torch.linalg.qr,
        "nuclear norm": lambda a: torch.linalg.matrix_norm(a, "nuc"),
        "spectral norm": lambda a: torch.linalg.matrix_norm(a, 2),
        "singular values": torch.linalg.svdvals,
        "singular values, squared and added": lambda a: torch.linalg.svdvals(a).square().sum(),
        "svd": lambda a: (lambda u, s, v: (u[:, :1] @ v[:1], s))(*torch.linalg.svd(a)),
        "solve_triangular": lambda a: torch.linalg.solve_triangular(a.triu(), rhs, upper=True),
        "solve_triangular, lower": lambda a: torch.linalg.solve_triangular(
            a.tril(), rhs, upper=False
        ),
        "triangular_solve": lambda a: torch.triangular_solve(rhs, a.triu())[0],
        "cholesky_solve": lambda a: torch.cholesky_solve(rhs, a.tril()),
        "cholesky_inverse": lambda a: torch.cholesky_inverse(a.tril()),
        "cond": torch.linalg.cond,
    }
    for name, f in of_square.items():
        yield Case(f"linalg: {name}", f, SQUARE)
    of_any = {
        "det": torch.linalg.det,
        "info of inv": lambda a: torch.linalg.inv_ex(a.detach()).info,
        "matrix_exp": torch.linalg.matrix_exp,
        "matrix_power": lambda a: torch.linalg.matrix_power(a, 3),
        "frobenius norm": torch.linalg.matrix_norm,
        "pinv": torch.linalg.pinv,
    }
    for name, f in of_any.items():
        yield Case(f"linalg: {name}", f, SQUARE | SINGULAR)
    four = {
        "drawn": (drawn(4, 4),),
        "rank 3": (drawn(4, 3) @ drawn(3, 4),),
        "rank 2": (drawn(4, 2) @ drawn(2, 4),),
        "a row of zeros": (drawn(4, 4) * numbers(0, 1, 1, 1)[:, None],),
        "equal rows": (drawn(4, 4).round()[[0, 0, 1, 2]],),
    }
    yield Case("linalg: det of four rows", torch.linalg.det, four)
    for wide in (False, True):
        turned = (lambda a: a.mT) if wide else (lambda a: a)
        of = "a wide matrix" if wide else "a tall matrix"
        yield Case(f"linalg: pinv of {of}", lambda a, t=turned: torch.linalg.pinv(t(a)), TALL)
        yield Case(
            f"linalg: pinv of {of}, with a tolerance",
            lambda a, t=turned: torch.linalg.pinv(t(a), rtol=1e-3),
            TALL,
        )
        yield Case(
            f"linalg: svd of {of}",
            lambda a, t=turned: torch.linalg.svd(t(a), full_matrices=False).S,
            TALL,
        )
    yield Case("linalg: qr of a tall matrix", torch.linalg.qr, TALL)
    of_symmetric = {
        "eigh": lambda a: (lambda w, v: (w, v[:, :1] * v[:, :1].mT))(*torch.linalg.eigh(a)),
        "eigvalsh": torch.linalg.eigvalsh,
        "eigenvalues, squared and added": lambda a: torch.linalg.eigvalsh(a).square().sum(),
        "exponential by eigh": lambda a: (lambda w, v: (v * w.exp()) @ v.mT)(*torch.linalg.eigh(a)),
        "hermitian pinv": lambda a: torch.linalg.pinv(a, hermitian=True),
    }
    for name, f in of_symmetric.items():
        yield Case(f"linalg: {name}", _symmetric(f), SYMMETRIC)
    of_definite = {
        "cholesky": torch.linalg.cholesky,
        "upper cholesky": lambda a: torch.linalg.cholesky(a, upper=True),
        "cholesky_inverse of cholesky": lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a)),
        "logarithm of eigenvalues": lambda a: torch.linalg.eigvalsh(a).log().sum(),
    }
    for name, f in of_definite.items():
        yield Case(f"linalg: {name}", _symmetric(f), DEFINITE)


def windows():
    rectified = {
        "drawn": (drawn(1, 2, 6, 6),),
        "ties at zero": (drawn(1, 2, 6, 6).relu(),),
        "zero": (torch.zeros(1, 2, 6, 6, dtype=F64),),
    }
    pools = {
        "max_pool2d": lambda x: F.max_pool2d(x, 2),
        "max_pool2d, overlapping": lambda x: F.max_pool2d(x, 3, 1, 1),
        "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (4, 3)),
        "avg_pool2d of squares": lambda x: F.avg_pool2d(x.square(), 3, 2, 1),
        "adaptive_avg_pool2d of squares": lambda x: F.adaptive_avg_pool2d(x.square(), (4, 3)),
        "lp_pool2d": lambda x: F.lp_pool2d(x, 3, 2),
        "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        "unfold and fold": lambda x: F.fold(F.unfold(x, 2).square(), (6, 6), 2),
        "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
            x, 2, (3, 3), _random_samples=torch.full((1, 2, 2), 0.3, dtype=F64)
        ),
        "local_response_norm": lambda x: F.local_response_norm(x, 2),
    }
    for name, f in pools.items():
        yield Case(f"windows: {name}", f, rectified)
    volumes = {label: (x.reshape(1, 2, 3, 3, 4),) for label, (x,) in rectified.items()}
    pools = {
        "max_pool3d": lambda x: F.max_pool3d(x, 2, 1),
        "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(x, (2, 2, 3)),
        "avg_pool3d of squares": lambda x: F.avg_pool3d(x.square(), 2, 1),
        "adaptive_avg_pool3d of squares": lambda x: F.adaptive_avg_pool3d(x.square(), (2, 2, 3)),
        "max_unpool3d": lambda x: F.max_unpool3d(
            *F.max_pool3d(x, (1, 1, 2), return_indices=True), (1, 1, 2)
        ),
        "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(
            x, 2, (1, 1, 2), _random_samples=torch.full((1, 2, 3), 0.3, dtype=F64)
        ),
    }
    for name, f in pools.items():
        yield Case(f"windows: {name}", f, volumes)
    image, grid = drawn(1, 1, 4, 5), drawn(1, 3, 3, 2).clamp(-0.9, 0.9)
    corners = torch.stack(pairs(numbers(-1, 0, 1)), -1).reshape(1, 3, 3, 2)
    places = {
        "drawn": (image, grid),
        "centre, edges and corners": (image, corners),
        "outside": (image, 1.7 * corners),
        "far outside": (image, 1e3 * corners),
    }
    for padding in ("zeros", "border", "reflection"):
        for mode, align in (
            ("bilinear", False),
            ("bilinear", True),
            ("nearest", True),
            ("bicubic", False),
        ):
            sample = lambda x, g, m=mode, p=padding, a=align: F.grid_sample(x, g, m, p, a)
            yield Case(f"grid_sample, {mode}, {padding}, align_corners={align}", sample, places)
        volume = lambda x, g, p=padding: F.grid_sample(
            x[:, :, None].expand(-1, -1, 3, -1, -1).square(),
            torch.nn.functional.pad(g, (0, 1))[:, None],
            "bilinear",
            p,
            True,
        )
        yield Case(f"grid_sample of a volume, {padding}", volume, places)


def choices():
    ties = {
        "drawn": (drawn(3, 6),),
        "ties": (drawn(3, 6).round(),),
        "all equal": (torch.ones(3, 6, dtype=F64),),
        "zero": (torch.zeros(3, 6, dtype=F64),),
    }
    bag = torch.tensor([[0, 1, 1, 2], [2, 2, 0, 0]])
    index = torch.tensor([[0, 1, 1, 2, 0, 1]] * 3)
    functions = {
        "median": lambda x: x.square().median(),
        "median, even": lambda x: x[:, :4].median(),
        "nanmedian": lambda x: x.nanmedian(),
        "median of rows": lambda x: x.median(1).values,
        "max of squares": lambda x: x.square().max(),
        "max of rows": lambda x: x.max(1).values,
        "amax of squares": lambda x: x.square().amax(1),
        "cummax": lambda x: x.cummax(1).values,
        "cumprod": lambda x: x.cumprod(1),
        "prod": lambda x: x.prod(1),
        "quantile": lambda x: x.quantile(0.4, dim=1),
        "logsumexp": lambda x: x.logsumexp(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "max of a bag": lambda x: F.embedding_bag(bag, x, mode="max"),
        "mean of a bag of squares": lambda x: F.embedding_bag(bag, x.square(), mode="mean"),
        "embedding": lambda x: F.embedding(bag, x.square(), padding_idx=1),
        "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=1),
        "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        "norm of order 1.5": lambda x: torch.linalg.vector_norm(x, 1.5, dim=1),
        "norm of order inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
        "distances": lambda x: torch.cdist(x, x.flip(0)),
        "distances of order 1": lambda x: torch.cdist(x, x.flip(0), p=1.0),
        "distances of order inf": lambda x: torch.cdist(x, x.flip(0), p=float("inf")),
        "distances among": lambda x: F.pdist(x),
        "distances of order inf among": lambda x: F.pdist(x, float("inf")),
        "deviation": lambda x: x.std(1),
        "variance": lambda x: x.var(1),
        "layer_norm": lambda x: F.layer_norm(x, (6,)),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "group_norm": lambda x: F.group_norm(x, 3),
        "rms_norm": lambda x: F.rms_norm(x, (6,)),
        "normalize": lambda x: F.normalize(x),
        "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(1)),
        "attention": lambda x: F.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None].sin()
        ),
        "softmax": lambda x: x.softmax(1),
        "clamp at one bound": lambda x: torch.clamp(x, x.flip(0), x.flip(0)),
        "clamp by tensors": lambda x: torch.clamp(x, x.flip(0) - 1, x.flip(0) + 1),
        "maximum": lambda x: torch.maximum(x.square(), x.flip(0)),
        "where": lambda x: torch.where(x > 0, x.square(), -x),
        "renorm": lambda x: x.renorm(2, 0, 1.0),
    }
    for name, f in functions.items():
        yield Case(f"choices: {name}", f, ties)
    for how in ("sum", "prod", "mean", "amax", "amin"):
        for included in (False, True):
            scatter = lambda x, how=how, i=included: x.scatter_reduce(
                1, index, x.flip(1), how, include_self=i
            )
            yield Case(f"choices: scatter_reduce of {how}, include_self={included}", scatter, ties)
    lengths = torch.tensor([1, 2])
    for how in ("sum", "mean", "max", "min", "prod"):
        reduce = lambda x, how=how: torch.segment_reduce(x, how, lengths=lengths)
        yield Case(f"choices: segment_reduce of {how}", reduce, ties)


def powers():
    for power in (-1, 0, 0.5, 1, 1.5, 2, 3):
        yield of_numbers(f"x ** {power}", lambda x, p=power: x**p)
    exponents = numbers(-1, 0, 0.5, 1, 1.5, 2, 3)
    yield of_pairs("x ** y", torch.pow, numbers(0, 1e-8, 0.5, 1, 2, 50), exponents)
    yield of_numbers("2 ** x", lambda x: 2.0**x)
    yield of_numbers("0 ** x", lambda x: 0.0**x, numbers(0.5, 1, 2))
    for approximate in ("none", "tanh"):
        yield of_numbers(f"gelu, {approximate}", lambda x, a=approximate: F.gelu(x, approximate=a))
    yield of_numbers("elu, alpha 2", lambda x: F.elu(x, 2.0))
    yield of_numbers("celu, alpha 0.5", lambda x: F.celu(x, 0.5))
    yield of_numbers("softplus, beta 2", lambda x: F.softplus(x, 2.0, 6.0))
    yield of_numbers("hardshrink", F.hardshrink)
    yield of_numbers("threshold", lambda x: F.threshold(x, 0.5, -1.0))
    yield of_numbers("hardtanh", lambda x: F.hardtanh(x) ** 2)
    yield of_numbers("relu6 of a square", lambda x: F.relu6(x * x))
    yield of_numbers("clamp of a square", lambda x: (x * x).clamp(0.25, 9))
    yield of_numbers("glu", lambda x: F.glu(torch.stack([x, x], -1))[..., 0])
    for n in (0, 1, 2):
        yield of_numbers(f"polygamma, {n}", lambda x, n=n: torch.polygamma(n, x), POSITIVE)


def networks():
    torch.manual_seed(0)
    inputs = {"drawn": (drawn(2, 3, 4),), "zero": (torch.zeros(2, 3, 4, dtype=F64),)}
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        net = kind(4, 2, batch_first=True).double()
        yield Case(f"networks: {kind.__name__}", lambda x, net=net: net(x)[0], inputs)
    convolution = torch.nn.Conv1d(3, 2, 3, padding=1, stride=2).double()
    yield Case("networks: Conv1d", lambda x: convolution(x.square()), inputs)
    back = torch.nn.ConvTranspose1d(3, 2, 3, padding=1, stride=2, output_padding=1).double()
    yield Case("networks: ConvTranspose1d", lambda x: back(x.square()), inputs)
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True).double()
    yield Case("networks: attention", lambda x: attention(x, x, x)[0], inputs)
    block = torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double()
    yield Case("networks: TransformerEncoderLayer", lambda x: block(x), inputs)
    yield Case("networks: fft", lambda x: torch.fft.rfft(x).abs(), inputs)
    yield Case("networks: stft", lambda x: torch.fft.irfft(torch.fft.rfft(x) ** 2), inputs)


def rest():
    """Values of integers, and rules that no other case is lowered to."""
    whole = torch.tensor([0, 1, -1, 2, -7, 12, 18, 2**31, -(2**40)])
    few = torch.tensor([0, 1, 2, 31, 62])
    of_integers = {
        "bitwise_xor": torch.bitwise_xor,
        "gcd": torch.gcd,
        "lcm": lambda x, y: torch.lcm(x % 1000, y % 1000),
    }
    for name, f in of_integers.items():
        yield Case(f"integers: {name}", f, {"": pairs(whole)}, True, differentiable=False)
    shifts = {
        "left shift": torch.bitwise_left_shift,
        "right shift": torch.bitwise_right_shift,
        "<<": lambda x, y: x.__lshift__(y),
        ">>": lambda x, y: x.__rshift__(y),
    }
    for name, f in shifts.items():
        yield Case(f"integers: {name}", f, {"": pairs(whole, few)}, True, differentiable=False)
    yield of_numbers("clamp_max of a square", lambda x: (x * x).clamp_max(4.0))
    yield Case(
        "bits of numbers",
        lambda x: x.view(torch.int64),
        {"": (OF_ONE,)},
        True,
        differentiable=False,
    )
    square = {"drawn": (drawn(3, 3),), "ties": (drawn(3, 3).round(),)}
    of_square = {
        "stable sort": lambda x: torch.sort(x, stable=True).values.square(),
        "lower triangle by indices": lambda x: x[tuple(torch.tril_indices(3, 3))].square(),
        "upper triangle by indices": lambda x: x[tuple(torch.triu_indices(3, 3))].square(),
        "torch.cholesky": lambda x: torch.cholesky(x @ x.T + torch.eye(3, dtype=F64)),
    }
    for name, f in of_square.items():
        yield Case(f"rest: {name}", f, square)
    checked = lambda x: torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x.sin())
    yield Case("rest: a distribution that checks", checked, square)
    yield Case("rest: nextafter", torch.nextafter, {"": pairs()}, True, differentiable=False)
    matrices = SQUARE | {"zero": (torch.zeros(3, 3, dtype=F64),)}
    moduli = lambda a: torch.ops.aten._linalg_eigvals(a).abs().sort().values
    yield Case("rest: moduli of eigenvalues", moduli, matrices, differentiable=False)
    prims = torch.ops.prims
    of_decompositions = {
        "broadcast_in_dim": lambda x: prims.broadcast_in_dim(x.square(), [2, 3, 3], [1, 2]),
        "collapse": lambda x: prims.collapse(x.square(), 0, 1),
        "convert_element_type": lambda x: prims.convert_element_type(x.square(), torch.float32),
        "iota": lambda x: (
            x * prims.iota(3, start=1, step=2, dtype=torch.int64, device="cpu", requires_grad=False)
        ),
    }
    for name, f in of_decompositions.items():
        yield Case(f"rest: prims.{name}", f, square)
    images = {"drawn": (drawn(1, 2, 6, 5),), "zero": (torch.zeros(1, 2, 6, 5, dtype=F64),)}
    for mode in ("bilinear", "bicubic"):
        resize = lambda x, mode=mode: F.interpolate(
            x.square(), size=(4, 7), mode=mode, antialias=True
        )
        yield Case(f"windows: antialiased {mode}", resize, images)


def cases():
    families = (losses, linear_algebra, windows, choices, powers, networks, rest)
    for family in families:
        yield from family()
