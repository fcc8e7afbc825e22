"""Distances between the feature distributions of generated and real images, and detection of copies.

n real and m generated images with d features each. A metric is specific to its feature space: published FID values are
the Fréchet distance in that of one Inception network.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FeatureMoments = tuple[np.ndarray, np.ndarray]  # mean (d,) and covariance (d, d) of features
PRECISION_NEIGHBOURS = 3  # k of precision and recall (arXiv:1904.06991, section 3)
DENSITY_NEIGHBOURS = 5  # k of density and coverage (arXiv:2002.09797, section 4)
CHUNK_ROWS = 1024  # rows of a distance matrix in memory at a time
COPY_QUANTILE = 0.01  # quantile of the distances among training images below which an image counts as a copy


def frechet_distance(real: np.ndarray, generated: np.ndarray) -> float:
    """Compute the squared Fréchet distance of Gaussians fitted to (n, d) and (m, d) features (arXiv:1706.08500, Eq. 6).

    Covariances are divided by n - 1. The distance is larger for few images, so only distances of equally many images
    are comparable. If there are fewer images than features, no covariance is computed: the trace of the root is the sum
    of the singular values of the product (n, m) of the centred matrices. Raises ValueError for fewer than two images.
    """
    if min(len(real), len(generated)) < 2:
        raise ValueError("a covariance needs at least two images")
    if max(len(real), len(generated)) >= real.shape[1]:
        return frechet_distance_of_moments(compute_moments(real), compute_moments(generated))
    arrays = [np.asarray(features, np.float64) for features in (real, generated)]
    mean_distance = np.square(arrays[0].mean(0) - arrays[1].mean(0)).sum()
    centred_real, centred_generated = (
        (features - features.mean(0)) / (len(features) - 1) ** 0.5 for features in arrays
    )
    roots = np.linalg.svd(centred_real @ centred_generated.T, compute_uv=False).sum()
    return float(
        max(0.0, mean_distance + np.square(centred_real).sum() + np.square(centred_generated).sum() - 2 * roots)
    )


def frechet_distance_of_moments(real: FeatureMoments, generated: FeatureMoments) -> float:
    """Compute the squared Fréchet distance of two Gaussians from means (d,) and covariances (d, d). It is |mu - mu'|^2
    + tr(C + C' - 2 (C C')^(1/2)), at least 0. The trace of the root is the sum of the roots of the eigenvalues of
    C^(1/2) C' C^(1/2), which is symmetric. Raises ValueError for different feature widths."""
    (mean, cov), (other_mean, other_cov) = real, generated
    if cov.shape != other_cov.shape:
        raise ValueError(f"moments of {len(mean)} and of {len(other_mean)} features are not comparable")
    values, vectors = np.linalg.eigh(cov)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    roots = np.sqrt(np.linalg.eigvalsh(root @ other_cov @ root).clip(min=0)).sum()
    return float(max(0.0, np.square(mean - other_mean).sum() + np.trace(cov) + np.trace(other_cov) - 2 * roots))


def compute_moments(features: np.ndarray) -> FeatureMoments:
    """Compute the mean (d,) and covariance (d, d), float64, of features (n, d)."""
    values = np.asarray(features, np.float64)
    return values.mean(0), np.atleast_2d(np.cov(values, rowvar=False))


def compute_precision_recall(
    real: np.ndarray, generated: np.ndarray, k: int = PRECISION_NEIGHBOURS
) -> tuple[float, float]:
    """Compute precision and recall of (n, d) real and (m, d) generated features, 0 to 1 (arXiv:1904.06991, Eqs. 1-2).
    precision: the share of generated images that are closer to a real image than its k-th neighbour among the real ones
    recall: the same with real and generated images exchanged"""
    return share_within_neighbours(real, generated, k), share_within_neighbours(generated, real, k)


def share_within_neighbours(centres: np.ndarray, points: np.ndarray, k: int) -> float:
    """Compute the share of `points` (m, d) that are closer to any of the `centres` (n, d) than that centre's k-th
    neighbour among the centres."""
    radii = compute_kth_distances(centres, k)
    is_inside = [(euclidean_distances(chunk, centres) <= radii).any(1) for chunk in split_feature_rows(points)]
    return float(torch.cat(is_inside).float().mean())


def compute_density_coverage(
    real: np.ndarray, generated: np.ndarray, k: int = DENSITY_NEIGHBOURS
) -> tuple[float, float]:
    """Compute density, at least 0, and coverage, 0 to 1, of (n, d) real and (m, d) generated features
    (arXiv:2002.09797, Eqs. 2-3).

    The ball of a real image extends to its k-th neighbour among the real images.

        density: the mean number of balls that contain a generated image, divided by k
        coverage: the share of balls that contain at least one generated image
    """
    radii, hits, covered = compute_kth_distances(real, k), 0, torch.zeros(len(real), dtype=torch.bool)
    for chunk in split_feature_rows(generated):
        is_inside = euclidean_distances(chunk, real) <= radii
        hits, covered = hits + int(is_inside.sum()), covered | is_inside.any(0)
    return hits / (k * len(generated)), float(covered.float().mean())


def measure_copy_share(train: np.ndarray, generated: np.ndarray) -> tuple[float, float]:
    """Measure the share of generated images (m, d) that are nearly copies of a training image (n, d), and the distance
    limit. The limit is the `COPY_QUANTILE` of nearest-neighbour distances among training images."""
    limit = float(torch.quantile(compute_kth_distances(train, 1), COPY_QUANTILE))
    nearest = torch.cat([euclidean_distances(chunk, train).min(1).values for chunk in split_feature_rows(generated)])
    return float((nearest < limit).float().mean()), limit


def compute_kth_distances(features: np.ndarray, k: int) -> Tensor:
    """Compute the distances (n,) float32 of (n, d) features to their k-th neighbour, or to the farthest image if there
    are fewer."""
    k = min(k, len(features) - 1)
    distances = [euclidean_distances(chunk, features).kthvalue(k + 1).values for chunk in split_feature_rows(features)]
    return torch.cat(distances)


def euclidean_distances(points: Tensor, centres: np.ndarray) -> Tensor:
    """Compute the Euclidean distances (b, n) float32 between (b, d) points and (n, d) centres."""
    return torch.cdist(points, torch.from_numpy(np.asarray(centres, np.float32)))


def split_feature_rows(features: np.ndarray) -> list[Tensor]:
    """Split features (n, d) into chunks (b, d) float32 of at most `CHUNK_ROWS` images."""
    return list(torch.from_numpy(np.asarray(features, np.float32)).split(CHUNK_ROWS))
