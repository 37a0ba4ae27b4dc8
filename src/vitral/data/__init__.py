"""Labelled pictures: where they come from, how they are read, split and checked.

load(DATA) -> DataSet -> Split -> picture         sources/: one file for each kind of source
                                                  intake.py: one way in for every picture
                                                  splits.py: validation cut, subsets
                                                  check.py: what is wrong with a data set
"""

from vitral.data.dataset import DataSet, Fetch, Split
from vitral.data.sources import SOURCES, load

__all__ = ["SOURCES", "DataSet", "Fetch", "Split", "load"]
