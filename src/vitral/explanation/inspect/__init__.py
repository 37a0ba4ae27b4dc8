"""Measures, drawings and page of Figure 7 of "An Image is Worth 16x16 Words" (arXiv 2010.11929), and related ones.

From the weights: `patch_filters`, `position_similarity`. From images: `attention_distance` (with entropy),
`token_norms` and `cka`, all in one pass by `measure`, and `head_maps` of one image. Attention is processed layer by
layer and dropped. Only norms grow with the number of images, by one value per token.
"""
