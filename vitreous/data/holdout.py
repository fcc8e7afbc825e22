"""Draw held-out splits from the training samples: within each class, or by complete groups such as the images of one
patient."""

from __future__ import annotations

import numpy as np

from vitreous.data.keys import derive_keys


def draw_stratified_splits(
    labels: np.ndarray, seed: int, shares: dict[str, float], groups: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Draw `train` and held-out splits within each class. Returns {split: ascending sample indices, int64}.

    `shares` has the share of each held-out split. A class gives round(share * its size) samples to each held-out split,
    and always keeps at least one for training. Multi-label samples, (n, K) float32, are drawn over all classes
    together. Unlabelled samples, (n, 0), and regression targets, (n, T) float64, are drawn as one class. `groups`, (n,)
    int64, are not divided between splits, so the shares are only approximate.
    """
    if labels.ndim == 2 and (not labels.shape[1] or labels.dtype == np.float64):  # unlabelled, or regression targets
        labels = np.zeros(len(labels), dtype=np.int64)
    if groups is not None:
        return draw_group_splits(labels, groups, seed, shares)
    if labels.ndim == 2:
        return draw_multilabel_splits(labels, seed, shares)
    indices_by_split: dict[str, list[np.ndarray]] = {name: [] for name in ("train", *shares)}
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(derive_keys(seed, label, np.arange(len(members))), kind="stable")]
        for name, share in shares.items():
            count = min(round(share * len(labels[labels == label])), len(members) - 1)
            indices_by_split[name].append(members[:count])
            members = members[count:]
        indices_by_split["train"].append(members)
    return {name: np.sort(np.concatenate(index_arrays)) for name, index_arrays in indices_by_split.items()}


def draw_multilabel_splits(labels: np.ndarray, seed: int, shares: dict[str, float]) -> dict[str, np.ndarray]:
    """Draw `train` and held-out splits for multi-label samples. Returns {split: ascending sample indices}.

    Labels are (n, K). A held-out split gets round(share * n) samples, but never the last training sample of a class.
    """
    open_slots = [name for name, share in shares.items() for _ in range(round(share * len(labels)))]
    remaining_counts = labels.sum(0)
    drawn_indices: dict[str, list[int]] = {name: [] for name in shares}
    train_indices = []
    for index in np.argsort(derive_keys(seed, np.arange(len(labels))), kind="stable"):
        if open_slots and (remaining_counts[labels[index] > 0] > 1).all():
            drawn_indices[open_slots.pop()].append(index)
            remaining_counts -= labels[index]
        else:
            train_indices.append(index)
    return {
        name: np.sort(np.array(indices, dtype=np.int64))
        for name, indices in (("train", train_indices), *drawn_indices.items())
    }


def draw_group_splits(
    labels: np.ndarray, groups: np.ndarray, seed: int, shares: dict[str, float]
) -> dict[str, np.ndarray]:
    """Draw `train` and held-out splits of complete groups. Returns {split: ascending sample indices}.

    `labels` (n,) int64 or (n, K) float32, `groups` (n,) int64. Groups are visited in an order that the seed determines.
    A group is added to a held-out split if this reduces the split's distance to its share of every class: the sum over
    classes of (taken - share x size)^2 / size. With (n, K) labels, the set of all images is one more class. At least
    one image of every class stays in `train`. If no group reduces the distance, the group that increases it least is
    added. If every group is needed in `train`, the split is empty.
    """
    if labels.ndim == 2:
        images, classes = np.nonzero(np.hstack([labels, np.ones((len(labels), 1), labels.dtype)]))
    else:
        images, classes = np.arange(len(labels)), np.unique(labels, return_inverse=True)[1]
    width = int(classes.max(initial=-1)) + 1
    group_indices = np.unique(groups, return_inverse=True)[1]
    cells, counts = np.unique(group_indices[images] * width + classes, return_counts=True)
    group_of_cell, classes = np.divmod(cells, max(width, 1))
    total = np.bincount(classes, counts)
    group_bounds = np.searchsorted(group_of_cell, np.arange(len(labels) + 1))
    order = np.argsort(derive_keys(seed, np.arange(group_indices.max(initial=-1) + 1)), kind="stable")
    remaining, split_of_group = total.copy(), np.zeros(len(order), dtype=np.int64)
    for split, share in enumerate(shares.values(), 1):
        missing_counts = share * total
        fallback: tuple[float, int] | None = None
        for group in order:
            if not (2 * missing_counts > 1).any():
                break
            members = slice(group_bounds[group], group_bounds[group + 1])
            group_classes, group_counts = classes[members], counts[members]
            if split_of_group[group] or (remaining[group_classes] <= group_counts).any():
                continue
            gain = float(
                (group_counts * (2 * missing_counts[group_classes] - group_counts) / total[group_classes]).sum()
            )
            if gain > 0:
                split_of_group[group] = split
                missing_counts[group_classes] -= group_counts
                remaining[group_classes] -= group_counts
            elif fallback is None or gain > fallback[0]:
                fallback = gain, group
        if fallback and not (split_of_group == split).any():
            split_of_group[fallback[1]] = split
            members = slice(group_bounds[fallback[1]], group_bounds[fallback[1] + 1])
            remaining[classes[members]] -= counts[members]
    return {
        name: np.flatnonzero(split_of_group[group_indices] == split) for split, name in enumerate(("train", *shares))
    }
