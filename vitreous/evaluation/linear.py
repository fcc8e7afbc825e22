"""Logistic regression on frozen features with a penalty chosen on held-out images, and few-shot ridge regression.

n images, d features, K classes. For features standardised by the training images it minimises the mean loss + l2 / 2
|W|^2. The loss is softmax cross-entropy, or the sum of sigmoid losses for multi-label data.

Small data sets are solved by scikit-learn. Large ones are read from disk chunk by chunk, on any device, for scipy's
L-BFGS: the same optimum, with one chunk in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitreous.data.labels import LabelKind, get_label_kind
from vitreous.errors import DataError
from vitreous.tasks.multilabel_metrics import MeanAveragePrecision

MAX_SKLEARN_ELEMENTS = 10_000_000  # largest number of feature values for scikit-learn, in float64
LOSS_CHUNK_IMAGES = 16_384  # images per chunk of the loss
# L-BFGS: maximum number of iterations, and gradient tolerance (largest component)
MAX_LBFGS_STEPS, GRADIENT_TOLERANCE = 1_000, 1e-5
COARSE_PENALTIES = tuple(10.0**power for power in range(2, -7, -1))  # coarse search, from strong to weak
NUM_HALVINGS = 3  # halvings of the step between powers around the best
NUM_PENALTY_FITS = len(COARSE_PENALTIES) + 2 * NUM_HALVINGS
ABSENT_CLASS_MARGIN = 20.0  # logit margin below the other classes, for a mean image, of a class without training images
DEFAULT_SHOTS = (1, 5, 10, 25)  # images per class of few-shot regression
RIDGE_L2 = 2.0**10  # penalty of few-shot regression
RIDGE_BIAS_FEATURE = 100.0  # constant feature: so large that the penalty hardly affects its weight
RIDGE_CHUNK_IMAGES = 8_192  # images per chunk of scores
STD_EPSILON = 1e-5  # added to the standard deviations

#: called after every fit with the penalty and the score
OnFit = Callable[[float, float], None]


@dataclass(frozen=True)
class LinearClassifier:
    """A linear classifier of raw features: `weight` (K, d) and `bias` (K,)."""

    weight: np.ndarray
    bias: np.ndarray
    l2: float

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Compute (m, K) float32 logits of (m, d) features."""
        weight = self.weight.T.astype(np.float32)
        parts = [features[low : low + LOSS_CHUNK_IMAGES] @ weight for low in range(0, len(features), LOSS_CHUNK_IMAGES)]
        return np.concatenate(parts) + self.bias.astype(np.float32)


@dataclass(frozen=True)
class LabelledFeatures:
    """Training images: features (n, d), the indices `rows` of those in use, and all labels, (n,) int64 or (n, K)."""

    features: np.ndarray
    labels: np.ndarray
    rows: np.ndarray
    classes: int
    _: KW_ONLY
    device: str = "cpu"

    @property
    def kind(self) -> LabelKind:
        """Whether the data are single-label or multi-label."""
        return get_label_kind(self.labels.ndim == 2)

    def with_rows(self, rows: np.ndarray) -> LabelledFeatures:
        """Return a copy with other `rows` (m,)."""
        return LabelledFeatures(self.features, self.labels, rows, self.classes, device=self.device)

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of each feature, (d,) float64; the std of a constant feature is 1."""
        mean = np.sum([self.features[part].sum(0, dtype=np.float64) for part in self.parts()], 0) / len(self.rows)
        squares = [((self.features[part] - mean) ** 2).sum(0) for part in self.parts()]
        spread = np.sqrt(np.sum(squares, 0) / len(self.rows))
        return mean, np.where(spread > 1e-6 * np.abs(mean) + 1e-12, spread, 1.0)

    def parts(self) -> list[np.ndarray]:
        """Return the rows in chunks, (m,) each."""
        return [self.rows[low : low + LOSS_CHUNK_IMAGES] for low in range(0, len(self.rows), LOSS_CHUNK_IMAGES)]


def fit_linear_classifier(
    known: LabelledFeatures, l2: float, start: LinearClassifier | None = None
) -> LinearClassifier:
    """Fit the classifier with a penalty; `start` is a warm start. A class without images is never predicted.

    Raises DataError if all images are of one class.
    """
    labels = known.labels[known.rows]
    present = np.flatnonzero(known.kind.count_classes(labels, known.classes))
    if len(present) < known.kind.least_classes:
        raise DataError("all training images are of one class", "use images of at least two classes")
    mean, spread = known.moments()
    small = len(known.rows) * known.features.shape[1] <= MAX_SKLEARN_ELEMENTS and known.kind.is_exclusive
    begin = (
        None if start is None else (start.weight[present] * spread, start.bias[present] + start.weight[present] @ mean)
    )
    weight, bias = (solve_with_sklearn if small else solve_with_lbfgs)(known, present, l2, (mean, spread), begin)
    whole = np.zeros((known.classes, len(mean)))
    low = np.full(known.classes, bias.min() - ABSENT_CLASS_MARGIN)
    whole[present], low[present] = weight / spread, bias - (weight / spread) @ mean
    return LinearClassifier(whole, low, l2)


FeatureStatistics = tuple[np.ndarray, np.ndarray]
# weight (K', d) and bias (K',), for standardised features and the classes with images
LinearSolution = tuple[np.ndarray, np.ndarray]


def solve_with_sklearn(
    known: LabelledFeatures, present: np.ndarray, l2: float, moments: FeatureStatistics, begin: LinearSolution | None
) -> LinearSolution:
    """Solve with scikit-learn for weight (K', d) and bias (K',); two classes have one row w = w1 - w0, with the
    equivalent penalty."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    x = (known.features[known.rows] - moments[0]) / moments[1]
    y = np.searchsorted(present, known.labels[known.rows])
    two = len(present) == 2
    model = LogisticRegression(
        C=(2 if two else 1) / (l2 * len(x)),
        tol=GRADIENT_TOLERANCE,
        max_iter=MAX_LBFGS_STEPS,
        warm_start=begin is not None,
    )
    if begin is not None:
        weight, bias = (begin[0][1:] - begin[0][:1], begin[1][1:] - begin[1][:1]) if two else begin
        model.coef_, model.intercept_ = weight.copy(), bias.copy()
    with warnings.catch_warnings():
        # a penalty so weak that it needs more iterations is not chosen
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y)
    weight, bias = np.asarray(model.coef_), np.asarray(model.intercept_)
    return (np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2) if two else (weight, bias)


def solve_with_lbfgs(
    known: LabelledFeatures, present: np.ndarray, l2: float, moments: FeatureStatistics, begin: LinearSolution | None
) -> LinearSolution:
    """Solve with L-BFGS for weight (K', d) and bias (K',); loss and gradient are sums over chunks."""
    from scipy.optimize import minimize

    shape = len(present), known.features.shape[1] + 1
    mean, spread = (torch.from_numpy(moment).float().to(known.device) for moment in moments)

    def chunk(rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return standardised features with a 1 for the bias, and labels."""
        x = (torch.from_numpy(np.asarray(known.features[rows], dtype=np.float32)).to(known.device) - mean) / spread
        y = known.kind.select_classes(known.labels[rows], present, known.classes)
        return F.pad(x, (0, 1), value=1.0), torch.from_numpy(y).to(known.device)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Compute loss and gradient at (K' (d + 1),) weights."""
        weight = torch.from_numpy(flat.reshape(shape)).float().to(known.device)
        total, slope = 0.0, np.zeros(shape)
        for rows in known.parts():
            x, y = chunk(rows)
            loss, gradient = compute_loss_and_gradient(x @ weight.T, y)
            total += loss
            slope += (gradient.T @ x).double().cpu().numpy()
        rest = flat.reshape(shape).copy()
        rest[:, -1] = 0  # the bias is not penalised
        value = total / len(known.rows) + l2 / 2 * float((rest**2).sum())
        return value, (slope / len(known.rows) + l2 * rest).ravel()

    at = np.zeros(shape) if begin is None else np.concatenate([begin[0], begin[1][:, None]], 1)
    options = {"maxiter": MAX_LBFGS_STEPS, "gtol": GRADIENT_TOLERANCE, "ftol": 1e-12, "maxls": 50}
    solution = minimize(objective, at.ravel(), jac=True, method="L-BFGS-B", options=options).x.reshape(shape)
    return solution[:, :-1], solution[:, -1]


def compute_loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Compute the sum of the losses of (b, K) logits and (b,) or (b, K) labels, and its gradient (b, K)."""
    if labels.ndim == 2:
        return float(F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")), logits.sigmoid() - labels
    gradient = logits.softmax(1)
    gradient[torch.arange(len(labels), device=labels.device), labels] -= 1
    return float(F.cross_entropy(logits, labels, reduction="sum")), gradient


def search_penalty(
    train: LabelledFeatures, held_out: LabelledFeatures, on_fit: OnFit = lambda l2, score: None
) -> tuple[float, float]:
    """Return the penalty with the best top-1 or mAP on held-out images, and that score.

    Tries powers of ten from strong to weak, each fit started at the previous solution; then the step around the best is
    halved `NUM_HALVINGS` times (CLIP's search, arXiv:2103.00020, appendix A.3, has the same form). Ties choose the
    stronger penalty.
    """
    tried: dict[float, float] = {}
    last: LinearClassifier | None = None
    features, labels = held_out.features[held_out.rows], held_out.labels[held_out.rows]

    def attempt(l2: float) -> None:
        nonlocal last
        last = fit_linear_classifier(train, l2, last)
        tried[l2] = score_logits(last.logits(features), labels)
        on_fit(l2, tried[l2])

    for l2 in COARSE_PENALTIES:
        attempt(l2)
    for halving in range(1, NUM_HALVINGS + 1):
        best, step = select_best_penalty(tried), 10.0**2.0**-halving
        for l2 in (best * step, best / step):
            attempt(l2)
    return select_best_penalty(tried), max(tried.values())


def select_best_penalty(tried: dict[float, float]) -> float:
    """Return the penalty of the highest score, the strongest of several."""
    return max(tried, key=lambda l2: (tried[l2], l2))


def score_logits(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return top-1 of (m, K) logits, or mAP for (m, K) labels."""
    if labels.ndim == 1:
        return float((logits.argmax(1) == labels).mean())
    mean_ap = MeanAveragePrecision(logits.astype(np.float64), labels > 0)
    return float(mean_ap(np.ones((len(labels), 1), np.float32))[0])


@dataclass(frozen=True)
class RidgeClassifier:
    """Few-shot ridge regression (arXiv:2010.11929, section 4.1), with the details of big_vision's fewshot_lsr.py.

    A linear map of standardised features: `weight` (d + 1, K), whose last row is for the constant feature.
    """

    mean: np.ndarray
    deviation: np.ndarray
    weight: np.ndarray

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Compute (m, K) float64 scores of (m, d) features, about 1 for a class and -1 for the others."""
        parts = [features[low : low + RIDGE_CHUNK_IMAGES] for low in range(0, len(features), RIDGE_CHUNK_IMAGES)]
        return np.concatenate([self.standard(part) @ self.weight for part in parts])

    def standard(self, features: np.ndarray) -> np.ndarray:
        """Return the (m, d + 1) float64 standardised inputs of (m, d) features."""
        return standardise_features(features, self.mean, self.deviation)


def fit_ridge_classifier(
    features: np.ndarray, labels: np.ndarray, classes: int, l2: float = RIDGE_L2
) -> RidgeClassifier:
    """Fit the map that minimises |X W - Y|^2 + l2 |W|^2 for X (n, d + 1) and Y (n, K), 1 for a class and -1 for others.

    W = (X^T X + l2 I)^-1 X^T Y = X^T (X X^T + l2 I)^-1 Y, by the eigenvectors of the smaller matrix.
    """
    known = np.asarray(features, dtype=np.float64)
    mean, deviation = known.mean(0), known.std(0) + STD_EPSILON
    x, y = standardise_features(known, mean, deviation), 2.0 * np.eye(classes)[labels] - 1.0
    if len(x) >= x.shape[1]:
        values, q = np.linalg.eigh(x.T @ x)
        left, right = q, q.T @ (x.T @ y)
    else:
        values, q = np.linalg.eigh(x @ x.T)
        left, right = x.T @ q, q.T @ y
    return RidgeClassifier(mean, deviation, (left / (values + l2)) @ right)


def standardise_features(features: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """Standardise (m, d) features and add the constant feature -> (m, d + 1) float64."""
    return np.pad((features - mean) / deviation, ((0, 0), (0, 1)), constant_values=RIDGE_BIAS_FEATURE)


def shuffle_rows_by_class(labels: np.ndarray, classes: int, seed: int) -> list[np.ndarray]:
    """Return the rows of each class of (n,) labels in random order by seed: the first `shots` are the training set."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
