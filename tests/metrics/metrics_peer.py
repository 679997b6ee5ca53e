"""scikit-learn's values for metrics_test.cpp: metrics_peer.py FOLDER writes inputs and values
there."""

import json
import sys

import numpy as np
import sklearn.metrics as m
from safetensors.numpy import save_file

rng = np.random.default_rng(5)
N, C = 997, 7
logits = rng.standard_normal((N, C)).astype(np.float32)
# Class 6 is rare.
classes = np.where(rng.random(N) < 0.5, logits.argmax(1), rng.integers(0, C - 1, N))
classes = classes.astype(np.int64)
scores = np.round(rng.standard_normal(N), 1)  # with many ties
binary = (scores + rng.standard_normal(N) > 0.3).astype(np.int64)
weights = rng.integers(0, 4, N).astype(np.float64)
fractions = rng.random(N)
wanted = (1e6 + rng.standard_normal((N, 3))).astype(np.float64)  # the mean is large: R2 cancels
predicted = wanted + rng.standard_normal((N, 3)) * np.array([0.1, 0.5, 2.0])

shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
probabilities = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)

save_file(
    {
        "logits": logits,
        "classes": classes,
        "scores": scores,
        "binary": binary,
        "weights": weights,
        "fractions": fractions,
        "wanted": wanted,
        "predicted": predicted,
    },
    sys.argv[1] + "/inputs.safetensors",
)


def values(weight, fraction):
    taken = logits.argmax(1)
    macro = dict(average="macro", sample_weight=weight, zero_division=0)
    return {
        "accuracy": m.accuracy_score(classes, taken, sample_weight=weight),
        "top_3_accuracy": m.top_k_accuracy_score(
            classes, logits, k=3, sample_weight=weight, labels=range(C)
        ),
        "precision": m.precision_score(classes, taken, **macro),
        "recall": m.recall_score(classes, taken, **macro),
        "f1": m.f1_score(classes, taken, **macro),
        "auc": m.roc_auc_score(binary, scores, sample_weight=fraction),
        "cross_entropy": m.log_loss(
            classes, probabilities, sample_weight=fraction, labels=range(C)
        ),
        "mse": m.mean_squared_error(wanted, predicted, sample_weight=fraction),
        "rmse": m.root_mean_squared_error(wanted, predicted, sample_weight=fraction),
        "mae": m.mean_absolute_error(wanted, predicted, sample_weight=fraction),
        "r2": m.r2_score(wanted, predicted, sample_weight=fraction),
        "mean": np.average(fractions, weights=fraction),
    }


with open(sys.argv[1] + "/values.json", "w") as out:
    json.dump(
        {
            "plain": values(None, None),
            "weighted": values(weights, fractions),
            "matrix": m.confusion_matrix(classes, logits.argmax(1), labels=range(C)).tolist(),
        },
        out,
    )
