"""Linear classifiers of frozen features: logistic regression with a penalty chosen on held-out images, and few-shot
ridge regression.

n images, d features, K classes. For features standardised by the training images, logistic regression minimises the
mean loss + l2 / 2 |W|^2. The loss is softmax cross-entropy, or the sum of sigmoid losses for multi-label data.

Small datasets are solved by scikit-learn. Large ones are read from disk chunk by chunk, on any device, for scipy's
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

#: callback after every fit: (penalty, score on held-out images)
OnFit = Callable[[float, float], None]


@dataclass(frozen=True)
class LinearClassifier:
    """A linear classifier of features before standardisation: `weight` (K, d) and `bias` (K,); `l2` is its penalty."""

    weight: np.ndarray
    bias: np.ndarray
    l2: float

    def logits(self, features: np.ndarray) -> np.ndarray:
        """Compute the logits (m, K) float32 of features (m, d)."""
        weight = self.weight.T.astype(np.float32)
        chunks = [
            features[start : start + LOSS_CHUNK_IMAGES] @ weight for start in range(0, len(features), LOSS_CHUNK_IMAGES)
        ]
        return np.concatenate(chunks) + self.bias.astype(np.float32)


@dataclass(frozen=True)
class LabelledFeatures:
    """Features (n, d) and labels, (n,) int64 or (n, K), of images; only those at `sample_indices` are used."""

    features: np.ndarray
    labels: np.ndarray
    sample_indices: np.ndarray
    classes: int
    _: KW_ONLY
    device: str = "cpu"

    @property
    def kind(self) -> LabelKind:
        """Whether the data are single-label or multi-label."""
        return get_label_kind(self.labels.ndim == 2)

    def with_rows(self, rows: np.ndarray) -> LabelledFeatures:
        """Return a copy that uses the images of other indices (m,)."""
        return LabelledFeatures(self.features, self.labels, rows, self.classes, device=self.device)

    def compute_moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute mean and standard deviation of each feature, (d,) float64; the std of a constant feature is 1."""
        mean = np.sum([self.features[chunk].sum(0, dtype=np.float64) for chunk in self.split_rows()], 0) / len(
            self.sample_indices
        )
        squares = [((self.features[chunk] - mean) ** 2).sum(0) for chunk in self.split_rows()]
        std = np.sqrt(np.sum(squares, 0) / len(self.sample_indices))
        return mean, np.where(std > 1e-6 * np.abs(mean) + 1e-12, std, 1.0)

    def split_rows(self) -> list[np.ndarray]:
        """Split `sample_indices` into chunks (m,) of at most `LOSS_CHUNK_IMAGES` images."""
        return [
            self.sample_indices[start : start + LOSS_CHUNK_IMAGES]
            for start in range(0, len(self.sample_indices), LOSS_CHUNK_IMAGES)
        ]


def fit_linear_classifier(
    train_data: LabelledFeatures, l2: float, start: LinearClassifier | None = None
) -> LinearClassifier:
    """Fit a linear classifier with the penalty `l2`; `start` is a warm start. A class without images is never
    predicted. Raises DataError if all images are of one class."""
    labels = train_data.labels[train_data.sample_indices]
    present_classes = np.flatnonzero(train_data.kind.count_classes(labels, train_data.classes))
    if len(present_classes) < train_data.kind.least_classes:
        raise DataError("all training images are of one class", "use images of at least two classes")
    mean, std = train_data.compute_moments()
    is_small = (
        len(train_data.sample_indices) * train_data.features.shape[1] <= MAX_SKLEARN_ELEMENTS
        and train_data.kind.is_exclusive
    )
    initial = (
        None
        if start is None
        else (start.weight[present_classes] * std, start.bias[present_classes] + start.weight[present_classes] @ mean)
    )
    weight, bias = (solve_with_sklearn if is_small else solve_with_lbfgs)(
        train_data, present_classes, l2, (mean, std), initial
    )
    full_weight = np.zeros((train_data.classes, len(mean)))
    full_bias = np.full(train_data.classes, bias.min() - ABSENT_CLASS_MARGIN)
    full_weight[present_classes], full_bias[present_classes] = weight / std, bias - (weight / std) @ mean
    return LinearClassifier(full_weight, full_bias, l2)


FeatureStatistics = tuple[np.ndarray, np.ndarray]
# weight (K', d) and bias (K',), for standardised features and the classes with images
LinearSolution = tuple[np.ndarray, np.ndarray]


def solve_with_sklearn(
    train_data: LabelledFeatures,
    present_classes: np.ndarray,
    l2: float,
    moments: FeatureStatistics,
    initial: LinearSolution | None,
) -> LinearSolution:
    """Fit weight (K', d) and bias (K',) of standardised features with scikit-learn, for the K' `present_classes`.
    scikit-learn fits one row w = w1 - w0 for two classes, with the equivalent penalty."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    x = (train_data.features[train_data.sample_indices] - moments[0]) / moments[1]
    y = np.searchsorted(present_classes, train_data.labels[train_data.sample_indices])
    is_binary = len(present_classes) == 2
    model = LogisticRegression(
        C=(2 if is_binary else 1) / (l2 * len(x)),
        tol=GRADIENT_TOLERANCE,
        max_iter=MAX_LBFGS_STEPS,
        warm_start=initial is not None,
    )
    if initial is not None:
        weight, bias = (initial[0][1:] - initial[0][:1], initial[1][1:] - initial[1][:1]) if is_binary else initial
        model.coef_, model.intercept_ = weight.copy(), bias.copy()
    with warnings.catch_warnings():
        # a penalty so weak that it needs more iterations is not chosen
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y)
    weight, bias = np.asarray(model.coef_), np.asarray(model.intercept_)
    return (np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2) if is_binary else (weight, bias)


def solve_with_lbfgs(
    train_data: LabelledFeatures,
    present_classes: np.ndarray,
    l2: float,
    moments: FeatureStatistics,
    initial: LinearSolution | None,
) -> LinearSolution:
    """Fit weight (K', d) and bias (K',) of standardised features with scipy's L-BFGS, for the K' `present_classes`.
    Loss and gradient are sums over chunks."""
    from scipy.optimize import minimize

    shape = len(present_classes), train_data.features.shape[1] + 1
    mean, std = (torch.from_numpy(moment).float().to(train_data.device) for moment in moments)

    def load_chunk(indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Load standardised features (b, d + 1), with a 1 for the bias, and labels."""
        x = (
            torch.from_numpy(np.asarray(train_data.features[indices], dtype=np.float32)).to(train_data.device) - mean
        ) / std
        y = train_data.kind.select_classes(train_data.labels[indices], present_classes, train_data.classes)
        return F.pad(x, (0, 1), value=1.0), torch.from_numpy(y).to(train_data.device)

    def compute_objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Compute loss and gradient at the flat weights (K' (d + 1),)."""
        weight = torch.from_numpy(flat.reshape(shape)).float().to(train_data.device)
        loss_sum, gradient_sum = 0.0, np.zeros(shape)
        for indices in train_data.split_rows():
            x, y = load_chunk(indices)
            loss, gradient = compute_loss_and_gradient(x @ weight.T, y)
            loss_sum += loss
            gradient_sum += (gradient.T @ x).double().cpu().numpy()
        penalised_weight = flat.reshape(shape).copy()
        penalised_weight[:, -1] = 0  # the bias is not penalised
        value = loss_sum / len(train_data.sample_indices) + l2 / 2 * float((penalised_weight**2).sum())
        return value, (gradient_sum / len(train_data.sample_indices) + l2 * penalised_weight).ravel()

    initial_weight = np.zeros(shape) if initial is None else np.concatenate([initial[0], initial[1][:, None]], 1)
    options = {"maxiter": MAX_LBFGS_STEPS, "gtol": GRADIENT_TOLERANCE, "ftol": 1e-12, "maxls": 50}
    solution = minimize(
        compute_objective, initial_weight.ravel(), jac=True, method="L-BFGS-B", options=options
    ).x.reshape(shape)
    return solution[:, :-1], solution[:, -1]


def compute_loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Compute the sum of the losses of (b, K) logits and (b,) or (b, K) labels, and its gradient with respect to the
    logits (b, K)."""
    if labels.ndim == 2:
        return float(F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")), logits.sigmoid() - labels
    gradient = logits.softmax(1)
    gradient[torch.arange(len(labels), device=labels.device), labels] -= 1
    return float(F.cross_entropy(logits, labels, reduction="sum")), gradient


def search_penalty(
    train: LabelledFeatures, held_out: LabelledFeatures, on_fit: OnFit = lambda l2, score: None
) -> tuple[float, float]:
    """Find the penalty with the best top-1 accuracy or mAP on held-out images; return it and its score.

    Tries powers of ten from strong to weak, each fit started at the previous solution; then the step around the best is
    halved `NUM_HALVINGS` times (CLIP's search, arXiv:2103.00020, appendix A.3, has the same form). Ties choose the
    stronger penalty.
    """
    scores: dict[float, float] = {}
    previous: LinearClassifier | None = None
    features, labels = held_out.features[held_out.sample_indices], held_out.labels[held_out.sample_indices]

    def try_penalty(l2: float) -> None:
        """Fit a classifier with this penalty, and store its score."""
        nonlocal previous
        previous = fit_linear_classifier(train, l2, previous)
        scores[l2] = score_logits(previous.logits(features), labels)
        on_fit(l2, scores[l2])

    for l2 in COARSE_PENALTIES:
        try_penalty(l2)
    for halving in range(1, NUM_HALVINGS + 1):
        best, step = select_best_penalty(scores), 10.0**2.0**-halving
        for l2 in (best * step, best / step):
            try_penalty(l2)
    return select_best_penalty(scores), max(scores.values())


def select_best_penalty(scores: dict[float, float]) -> float:
    """Return the penalty with the highest score, the strongest of equals; `scores`: penalty -> score."""
    return max(scores, key=lambda l2: (scores[l2], l2))


def score_logits(logits: np.ndarray, labels: np.ndarray) -> float:
    """Compute top-1 accuracy of (m, K) logits for (m,) labels, or mAP for (m, K) labels."""
    if labels.ndim == 1:
        return float((logits.argmax(1) == labels).mean())
    mean_ap = MeanAveragePrecision(logits.astype(np.float64), labels > 0)
    return float(mean_ap(np.ones((len(labels), 1), np.float32))[0])


@dataclass(frozen=True)
class RidgeClassifier:
    """The classifier of few-shot ridge regression (arXiv:2010.11929, section 4.1), with the details of big_vision's
    fewshot_lsr.py. It is a linear map of standardised features: `weight` (d + 1, K), whose last row is for the constant
    feature. `mean` and `std` (d,) are those of the training features."""

    mean: np.ndarray
    std: np.ndarray
    weight: np.ndarray

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Compute class scores (m, K) float64 of (m, d) features: about 1 for the predicted class and -1 for others."""
        chunks = [features[start : start + RIDGE_CHUNK_IMAGES] for start in range(0, len(features), RIDGE_CHUNK_IMAGES)]
        return np.concatenate([self.standard(chunk) @ self.weight for chunk in chunks])

    def standard(self, features: np.ndarray) -> np.ndarray:
        """Standardise (m, d) features and add the constant feature: (m, d + 1) float64."""
        return standardise_features(features, self.mean, self.std)


def fit_ridge_classifier(
    features: np.ndarray, labels: np.ndarray, num_classes: int, l2: float = RIDGE_L2
) -> RidgeClassifier:
    """Fit few-shot ridge regression: minimise |X W - Y|^2 + l2 |W|^2 over W, for X (n, d + 1) and Y (n, K). Y is 1
    for the image's class and -1 for others. W = (X^T X + l2 I)^-1 X^T Y = X^T (X X^T + l2 I)^-1 Y, by the
    eigenvectors of the smaller matrix."""
    inputs = np.asarray(features, dtype=np.float64)
    mean, std = inputs.mean(0), inputs.std(0) + STD_EPSILON
    x, y = standardise_features(inputs, mean, std), 2.0 * np.eye(num_classes)[labels] - 1.0
    if len(x) >= x.shape[1]:
        eigenvalues, eigenvectors = np.linalg.eigh(x.T @ x)
        left_factor, right_factor = eigenvectors, eigenvectors.T @ (x.T @ y)
    else:
        eigenvalues, eigenvectors = np.linalg.eigh(x @ x.T)
        left_factor, right_factor = x.T @ eigenvectors, eigenvectors.T @ y
    return RidgeClassifier(mean, std, (left_factor / (eigenvalues + l2)) @ right_factor)


def standardise_features(features: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Standardise features (m, d) by `mean` and `std` (d,), and add the constant feature: (m, d + 1) float64."""
    return np.pad((features - mean) / std, ((0, 0), (0, 1)), constant_values=RIDGE_BIAS_FEATURE)


def shuffle_rows_by_class(labels: np.ndarray, num_classes: int, seed: int) -> list[np.ndarray]:
    """Shuffle the indices of the images of each class, by seed: the first `shots` of a class are its training set.
    `labels` is (n,)."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]
