"""Labeled images: sources, decoding, splits, checks.

load(DATA) -> DataSet -> Split -> image         sources/: one file for each kind of source
                                                  decode.py: the decoder of every image
                                                  splits.py: validation split, subsets
                                                  validate.py: defects of a data set
"""

from vitral.data.dataset import DataSet, Fetch, Split
from vitral.data.sources import SOURCES, load

__all__ = ["SOURCES", "DataSet", "Fetch", "Split", "load"]
