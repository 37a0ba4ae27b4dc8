"""Examples that end the help of each command. `tests/test_docs.py` runs them in this order."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, str] = {
    "demo": "vitral demo",
    "label": "vitral label photos/ --classes rose tulip",
    "train": "vitral train photos/ --minutes 30",
    "pretrain": "vitral pretrain photos/ --minutes 30 --out runs/learned",
    "evaluate": "vitral evaluate runs/photos",
    "compare": "vitral compare runs/photos runs/other",
    "study data": "vitral study data photos/ --models S/16 Ti/16 --fractions 0.5 1 --seeds 2",
    "study compute": "vitral study compute photos/ --models S/16 Ti/16 --epochs 5 20 --seeds 2",
    "study options": "vitral study options photos/ --vary augment=none,affine --seeds 2",
    "study resume": "vitral study resume studies/photos-data",
    "tune": "vitral tune photos/ --trials 20 --minutes 60",
    "reproduce": "vitral reproduce positions --data photos/ --seeds 2",
    "replay": "vitral replay runs/photos --step 1 --out first.png",
    "predict": "vitral predict runs/photos other/ --out table.csv",
    "embed": "vitral embed runs/photos photos/ --out features.npz",
    "similar": "vitral similar runs/photos cat.jpg photos/",
    "explain": "vitral explain runs/photos cat.jpg",
    "inspect": "vitral inspect runs/photos",
    "serve": "vitral serve runs/photos",
    "summary": "vitral summary Ti/16",
    "models": "vitral models",
    "convert": "vitral convert runs/photos photos-hf --to hf",
    "quantize": "vitral quantize runs/photos",
    "export": "vitral export runs/photos --to onnx",
    "push": "vitral push runs/photos me/photos --license mit --dry-run --out published",
    "data check": "vitral data check photos/ --labels",
    "data shard": "vitral data shard photos/ --out shards/",
    "data cache": "vitral data cache --clear",
    "verify": "vitral verify runs/photos",
    "bench": "vitral bench Ti/16 --what inference --batch 1 --peers timm",
    "completion": "vitral completion bash",
}
"""Command → one line that does something useful on a reader's own folder `photos/` and its run."""
