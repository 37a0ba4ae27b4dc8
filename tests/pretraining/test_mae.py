"""The masked autoencoder against loops in NumPy, and against transformers' with the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitral.data.images.preprocessing import Preprocessing
from vitral.model import ViT, ViTConfig
from vitral.pretraining.mae import Decoder, MaskedAutoencoder
from vitral.pretraining.masking import divide, images_of, patches_of

CONFIG = ViTConfig(image_size=(8, 12), patch_size=4, classes=0, dim=16, depth=2, heads=2, mlp_dim=32)


def small(config: ViTConfig = CONFIG, share: float = 0.5, **options: bool) -> MaskedAutoencoder:
    torch.manual_seed(0)
    return MaskedAutoencoder(ViT(config), Decoder(config, 8, 2, heads=2), share, **options)


def test_patches_are_cut_row_by_row_and_joined_again():
    images = torch.randn(2, 3, 8, 12)
    patches = patches_of(images, (4, 4))
    for b in range(2):
        for number in range(6):
            row, column = 4 * (number // 3), 4 * (number % 3)
            cut = images[b, :, row : row + 4, column : column + 4]
            assert torch.equal(
                patches[b, number], torch.stack([cut[:, i, j] for i in range(4) for j in range(4)]).flatten()
            )
    assert torch.equal(images_of(patches, (4, 4), (2, 3)), images)


@pytest.mark.parametrize(
    ("count", "share", "kept"), [(64, 0.75, 16), (6, 0.5, 3), (7, 0.5, 3), (4, 0.9, 1), (4, 0.01, 3)]
)
def test_patches_are_divided_by_noise(count, share, kept):
    noise = torch.rand(3, count)
    visible, masked = divide(noise, share)
    assert visible.shape == (3, kept)
    for row, left, right in zip(noise, visible, masked, strict=True):
        assert sorted([*left.tolist(), *right.tolist()]) == list(range(count))
        assert row[left].max() <= row[right].min()


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_that_of_a_loop_over_patches(normalize):
    """Every visible patch is encoded alone with the others, in the order of the image, and decoded in its place."""
    model = small(normalize=normalize).eval()
    images, noise = torch.randn(3, 3, 8, 12), torch.rand(3, 6)
    total, count = 0.0, 0
    for image, row in zip(images, noise, strict=True):
        order = np.argsort(row.numpy(), kind="stable")
        visible, masked = sorted(order[:3]), sorted(order[3:])
        tokens, _ = model.encoder.embed(image[None])
        x = torch.cat([tokens[:, :1], *(tokens[:, 1 + place, None] for place in visible)], dim=1)
        for block in model.encoder.blocks:
            x = block(x)
        x = model.decoder.embed(model.encoder.norm(x))
        full = [x[:, :1] + model.decoder.position[:, :1]]
        for place in range(6):
            token = x[:, 1 + visible.index(place), None] if place in visible else model.decoder.mask_token
            full.append(token + model.decoder.position[:, 1 + place, None])
        y = torch.cat(full, dim=1)
        for block in model.decoder.blocks:
            y = block(y)
        pixels = model.decoder.pixels(model.decoder.norm(y))[0, 1:].detach().double().numpy()
        for place in masked:
            r, c = 4 * (place // 3), 4 * (place % 3)
            wanted = image[:, r : r + 4, c : c + 4].permute(1, 2, 0).double().numpy().ravel()
            if normalize:
                wanted = (wanted - wanted.mean()) / np.sqrt(wanted.var(ddof=1) + 1e-6)
            total, count = total + float(((pixels[place] - wanted) ** 2).mean()), count + 1
    loss, _ = model(images, noise)
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("position", ["learned", "sincos", "rotary", "none"])
@pytest.mark.parametrize("prefix", [{"cls_token": False, "pool": "mean"}, {"registers": 3}])
def test_hidden_pixels_do_not_reach_the_encoder(position, prefix):
    model = small(ViTConfig(**{**vars(CONFIG), "position": position, **prefix})).eval()
    images, noise = torch.randn(2, 3, 8, 12), torch.rand(2, 6)
    visible, masked = divide(noise, 0.5)
    calls = []
    model.encoder.blocks[0].register_forward_hook(lambda _, given, __: calls.append(given[0].shape[1]))
    tokens = model.encode(images, visible)
    patches = patches_of(images, (4, 4)).clone()
    patches.scatter_(1, masked[..., None].expand(-1, -1, 48), 9.0)
    assert torch.equal(model.encode(images_of(patches, (4, 4), (2, 3)), visible), tokens)
    assert calls == [3 + model.encoder.config.prefix] * 2  # the others are not computed


def test_predictions_for_visible_patches_do_not_change_the_others():
    model = small().eval()
    images, noise = torch.randn(2, 3, 8, 12), torch.rand(2, 6)
    visible, masked = divide(noise, 0.5)
    with torch.no_grad():
        alone = model.decoder(model.encode(images, visible), visible, masked)
    everywhere = model.predicted_pixels(images, noise)
    assert torch.allclose(everywhere.gather(1, masked[..., None].expand_as(alone)), alone, atol=1e-6)


def test_a_perfect_prediction_reconstructs_the_image():
    model = small()
    images, noise = torch.randn(2, 3, 8, 12), torch.rand(2, 6)
    model.predicted_pixels = lambda images, noise: model.target(images)  # type: ignore[method-assign]
    masked, filled = model.reconstruct(images, noise)
    assert torch.allclose(filled, images, atol=1e-5)
    assert (masked == 0).float().mean() == 0.5


def test_inputs_are_drawn_from_the_global_generator():
    preprocessing = Preprocessing((8, 12))
    pixels = torch.randint(0, 256, (2, 3, 8, 12), dtype=torch.uint8)
    draw = MaskedAutoencoder.draw(None, CONFIG)  # type: ignore[arg-type]  # no option is read
    torch.manual_seed(1)
    images, noise, _ = draw(pixels, preprocessing)
    torch.manual_seed(1)
    assert torch.equal(noise, torch.rand(2, 6))
    assert torch.equal(images, preprocessing.standardize(pixels))


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_and_reconstruction_are_those_of_transformers(normalize):
    transformers = pytest.importorskip("transformers")
    shape = {"image_size": 24, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    decoder = {"decoder_hidden_size": 24, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 3}
    config = transformers.ViTMAEConfig(
        **shape, **decoder, intermediate_size=64, decoder_intermediate_size=48, mask_ratio=0.75, norm_pix_loss=normalize
    )
    torch.manual_seed(0)
    theirs = transformers.ViTMAEForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    ours = MaskedAutoencoder(
        ViT(ViTConfig(24, 4, classes=0, dim=32, depth=3, heads=4, mlp_dim=64, norm_eps=config.layer_norm_eps)),
        Decoder(
            ViTConfig(24, 4, classes=0, dim=32, heads=4, norm_eps=config.layer_norm_eps), 24, 2, heads=3, mlp_dim=48
        ),
        normalize=normalize,
    ).eval()
    ours.load_state_dict(translated(theirs.state_dict()))
    images, noise = torch.randn(2, 3, 24, 24), torch.rand(2, 36)
    with torch.no_grad():
        wanted = theirs(images, noise=noise)
        loss, _ = ours(images, noise)
    assert float(loss) == pytest.approx(float(wanted.loss), rel=1e-5)
    assert torch.allclose(ours.predicted_pixels(images, noise), wanted.logits, atol=1e-5)


def translated(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of transformers' ViTMAE, and its separate q, k and v, to vitral's."""
    plain = {
        "vit.embeddings.cls_token": "encoder.cls_token",
        "vit.embeddings.position_embeddings": "encoder.pos_embed",
        "vit.embeddings.patch_embeddings.projection": "encoder.patch_embed.proj",
        "vit.layernorm": "encoder.norm",
        "decoder.decoder_embed": "decoder.embed",
        "decoder.decoder_norm": "decoder.norm",
        "decoder.decoder_pred": "decoder.pixels",
        "decoder.decoder_pos_embed": "decoder.position",
        "decoder.mask_token": "decoder.mask_token",
        "vit.layers.": "encoder.blocks.",
        "decoder.decoder_layers.": "decoder.blocks.",
        "attention.q_proj": "attn.q",
        "attention.k_proj": "attn.k",
        "attention.v_proj": "attn.v",
        "attention.o_proj": "attn.proj",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
    }
    renamed = {}
    for name, value in state.items():
        for old, new in plain.items():
            name = name.replace(old, new)
        renamed[name] = value
    for name in [name for name in renamed if ".attn.q." in name]:
        parts = [renamed.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
        renamed[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return renamed
