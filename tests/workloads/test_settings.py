from typing import Any

import pytest

from hocket.workloads import SettingsError, names, settings_from_options
from hocket.workloads.edsr.settings import EdsrSettings


def test_defaults_are_the_demo() -> None:
    settings = settings_from_options("edsr", {"workers": 2})
    assert isinstance(settings, EdsrSettings)
    assert (settings.size, settings.scale, settings.patch, settings.batch_size) == ("demo", 2, 32, 16)


def test_defaults_follow_what_was_given() -> None:
    settings = settings_from_options("edsr", {"workers": 1, "size": "full", "scale": 4})
    assert isinstance(settings, EdsrSettings)
    assert (settings.patch, settings.lr) == (48 * 4, 1e-4)  # the paper's low-resolution patch and learning rate


def test_epochs_are_another_way_to_say_steps() -> None:
    assert settings_from_options("edsr", {"workers": 1, "epochs": 3, "batch_size": 30}).steps == 3 * 53
    assert settings_from_options("resnet50", {"workers": 1, "synthetic": True, "epochs": 2}).steps == 2 * 80_072


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("train.py", {}, "`hocket run -n 2 train.py` starts a script"),
        ("alexnet", {}, "there is no workload 'alexnet'; there are edsr, resnet50, resnet101, language_model"),
        ("edsr", {"workers": 0}, "-n 0: there must be at least one worker"),
        ("edsr", {"workers": 4, "batch_size": 3}, "--batch-size 3 is smaller than -n 4.*use --batch-size 4 or more"),
        ("edsr", {"batch_size": 0}, "--batch-size 0"),
        ("edsr", {"batch_size": 0, "epochs": 1}, "--batch-size 0"),
        ("edsr", {"batch_size": 1601, "epochs": 1}, "--batch-size 1601: an epoch has only 1600 images"),
        ("edsr", {"scale": 5}, "--scale 5: EDSR magnifies by 2, 3, 4"),
        ("edsr", {"size": "huge"}, "--size huge: not one of full, baseline, demo, tiny"),
        ("edsr", {"patch": 5000}, r"--patch 5000 is larger than a photograph: china.jpg leaves at most --patch 426"),
        ("edsr", {"patch": 428}, r"--patch 428 is larger than a photograph"),
        ("edsr", {"patch": 31}, "--patch 31 is not a multiple of --scale 2; use for instance --patch 32"),
        ("edsr", {"patch": 0}, "--patch 0 is not a multiple of --scale 2; use for instance --patch 2"),
        ("edsr", {"steps": 0}, "--steps 0"),
        ("edsr", {"epochs": 0}, "--epochs 0"),
        ("edsr", {"steps": 5, "epochs": 1}, "--steps 5 and --epochs 1 both"),
        ("edsr", {"lr": 0.0}, "--lr 0.0: the learning rate must be a positive number"),
        ("edsr", {"lr": float("nan")}, "--lr nan"),
        ("edsr", {"seed": -1}, "--seed -1"),
        ("edsr", {"device": "tpu"}, "--device tpu: not one of auto, cpu, cuda"),
        ("edsr", {"image_size": 64}, "--image-size: edsr takes no such option; it takes --autocast, --batch-size"),
        ("resnet50", {}, "give --synthetic"),
        ("resnet50", {"synthetic": True, "patch": 32}, "--patch: resnet50 takes no such option"),
        ("resnet50", {"synthetic": True, "image_size": 16}, "--image-size 16"),
        ("resnet50", {"synthetic": True, "image_size": 32, "batch_size": 1}, "too little for batch normalisation"),
    ],
)
def test_bad_input_is_refused_with_option_value_and_remedy(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings_from_options(name, {"workers": 1, **options})


def test_the_largest_patch_is_accepted() -> None:
    assert settings_from_options("edsr", {"workers": 1, "patch": 426}).steps == 2400


def test_the_bundled_workloads_are_known() -> None:
    assert names() == (
        "edsr",
        "resnet50",
        "resnet101",
        "language_model",
        "translation",
        "recommender",
        "cosmoflow",
        "climate",
    )
