"""Numbers of images that are enough: the thresholds of all messages and choices that depend on them.

Each counts images, or groups of images that belong together where there are fewer. The 95% interval of an accuracy of
80% is about ±14 points with 30 images, ±11 with 50 and ±8 with 100.
"""

from __future__ import annotations

FOR_RATES = 100
"""For rates such as an accuracy or the ECE: with fewer, an accuracy may be off by ten percent, and even a calibrated
network may have an ECE as large.
"""
TO_CHOOSE_AN_EPOCH = 100
"""Validation images that can choose an epoch. The best of many epochs on fewer is so by chance."""
FOR_A_FIT = 50
"""Validation images to which one number is fitted: a temperature, or the threshold of unknown images. With fewer it
would be noise.
"""
FOR_ADVICE = 30
"""Held-out images from which an accuracy is stated as one to rely on. With fewer, the plan recommends to hold out more
of them, no epoch is called the best one, and the pages of `vitral label` show "too few to say".
"""
FOR_A_CLASS = 30
"""Held-out images of a class from which its figures are not called uncertain in a model card."""
