"""The server's decoding process reads multi-band TIFF files of every compression without opening a file."""

import pickle
import subprocess
import sys

from tests.data.band_files import make_bands, write_tiff
from tests.data.test_bands import needs_imagecodecs

DECODE_SCRIPT = """
import pickle, resource, sys
contents = pickle.loads(sys.stdin.buffer.read())
from vitreous.data.modalities.bands import BandPreprocess
from vitreous.apps.server import child
child.import_decoders()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
preprocess = BandPreprocess((32, 32), 5, (0.3,) * 5, (0.1,) * 5, numbers="float32")
settings = child.DecodeSettings(preprocess, False, 10_000)
for content in contents:
    print(child.decode_request_image(content, settings, True).shape)
"""


@needs_imagecodecs
def test_every_tiff_compression_is_decoded_in_the_sandbox(tmp_path):
    compressions = [("lzw", 3), ("zstd", False), ("packbits", False), ("lzma", False), ("zlib", 3)]
    paths = [
        write_tiff(tmp_path / f"{codec}.tif", make_bands(5, "float32"), compression=codec, predictor=predictor)
        for codec, predictor in compressions
    ]
    contents = pickle.dumps([path.read_bytes() for path in paths])
    done = subprocess.run([sys.executable, "-c", DECODE_SCRIPT], input=contents, capture_output=True)
    assert done.stdout.decode().splitlines() == ["(5, 32, 32)"] * len(compressions), done.stderr.decode()
