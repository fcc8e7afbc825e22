"""Feature distillation: formulas, teachers and students of all families, and training on digits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import read_metrics_lines  # type: ignore[attr-defined]
