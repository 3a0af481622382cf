"""The adult data: what ships is LIBSVM's a9a to the last byte, and a user's own file is checked line by line."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import stat
from importlib import resources

import numpy as np
import pytest

from sgdol.paper import data


def test_the_shipped_data_are_the_a9a_of_libsvm_to_the_last_byte():
    text = data.a9a_text()
    assert len(text) == data.A9A_BYTES
    assert hashlib.sha256(text).hexdigest() == data.A9A_SHA256


def test_the_shipped_file_is_small_and_what_its_build_gives():
    shipped = resources.files("sgdol.paper").joinpath("adult.bz2").read_bytes()
    assert 100_000 <= len(shipped) <= 200_000
    codes = np.frombuffer(bz2.decompress(shipped), dtype=np.uint8).reshape(-1, 15)
    assert data.encode(codes) == shipped


def test_attribution_and_licence_ship_beside_the_data():
    text = resources.files("sgdol.paper").joinpath("adult.txt").read_text()
    assert "CC BY 4.0" in text
    assert "10.24432/C5XW20" in text
    assert "Becker" in text
    assert "Kohavi" in text


def test_the_attributes_make_123_features():
    assert sum(attribute.width for attribute in data.ATTRIBUTES) == data.N_FEATURES == 123


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [("age", "25", 1), ("age", "26", 2), ("age", "90", 5), ("sex", "Male", 2), ("workclass", "?", 0)],
)
def test_a_value_of_adult_data_sets_the_feature_that_a9a_sets(name, text, code):
    attribute = next(a for a in data.ATTRIBUTES if a.name == name)
    assert attribute.code(text) == code


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return data.export_a9a(tmp_path_factory.mktemp("a9a") / "a9a")


def test_what_is_exported_reads_back_as_what_was_shipped(exported):
    features, labels = data.read_libsvm(exported)
    shipped_features, shipped_labels = data.load_a9a()
    np.testing.assert_array_equal(features, shipped_features)
    np.testing.assert_array_equal(labels, shipped_labels)


def test_exporting_twice_is_fine_but_another_file_is_left_alone(exported, tmp_path):
    assert data.export_a9a(exported) == exported
    mine = tmp_path / "mine"
    mine.write_text("precious\n")
    with pytest.raises(data.DataError, match="left alone"):
        data.export_a9a(mine)
    assert mine.read_text() == "precious\n"


def test_exporting_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(data.DataError, match=r"cannot write .*No such file"):
        data.export_a9a(tmp_path / "nowhere" / "a9a")


def test_an_exported_file_is_readable_by_everybody_and_leaves_nothing_behind(exported):
    assert stat.S_IMODE(exported.stat().st_mode) == 0o644
    assert list(exported.parent.iterdir()) == [exported]


def test_balanced_adult_is_what_section_7_describes():
    adult = data.balanced_adult()
    _, labels = data.load_a9a()
    assert adult.features.shape == (15682, 124)
    assert adult.features.dtype == np.float64
    assert (adult.features[:, -1] == 1).all()
    assert (adult.labels == 1).sum() == (adult.labels == -1).sum() == 7841
    assert set(np.flatnonzero(labels == 1)) <= set(adult.rows)
    assert len(set(adult.rows)) == 15682


def test_the_seed_names_the_draw():
    one, again, other = data.balanced_adult(1), data.balanced_adult(1), data.balanced_adult(2)
    np.testing.assert_array_equal(one.rows, again.rows)
    assert (one.rows != other.rows).any()


def test_a_users_own_file_takes_the_place_of_the_shipped_one(exported):
    np.testing.assert_array_equal(data.balanced_adult(3, exported).features, data.balanced_adult(3).features)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_are_read(tmp_path, compress):
    path = tmp_path / "file"
    path.write_bytes(compress(b"+1 3:1 123:0.5\n-1 \n"))
    features, labels = data.read_libsvm(path)
    assert features[0, 2] == 1
    assert features[0, 122] == 0.5
    assert labels.tolist() == [1, -1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"+1 3:1\n\n-1 4:1\n", "line 2: found an empty line"),
        (b"+1 3:1\n0 4:1\n", r"line 2: found the label '0', allowed are -1 and \+1"),
        (b"+1 124:1\n", "line 1: found the index 124, allowed are 1 to 123"),
        (b"+1 0:1\n", "line 1: found the index 0, allowed are 1 to 123"),
        (b"-1 4:1 3:1\n", "line 1: found the index 3 after 4, indices must ascend"),
        (b"-1 4:1 4:1\n", "line 1: found the index 4 after 4, indices must ascend"),
        (b"-1 4:x\n", "line 1: found '4:x', expected a pair index:value"),
        (b"-1 3:1_0\n", "line 1: found '3:1_0', expected a pair index:value"),
        (b"-1 1_2:1\n", "line 1: found '1_2:1', expected a pair index:value"),
        (b"-1 4:nan\n", "line 1: found the value 'nan' of index 4"),
        (b"-1 4\n", "line 1: found '4', expected a pair"),
        (b"-1 4:1\n+1 1", "line 2: found '1'.*truncated"),
        (b"-1 4:1\n+1 11:1", "line 2: the file ends without a newline, so it looks truncated"),
        (b"\x89PNG\r\n\x1a\n", "line 1: found the label"),
        pytest.param(gzip.compress(b"+1 3:1\n" * 50)[:-9], "is truncated or damaged", id="cut gzip file"),
        pytest.param(bz2.compress(b"+1 3:1\n" * 50)[:-9], "is truncated or damaged", id="cut bz2 file"),
        pytest.param(lzma.compress(b"+1 3:1\n" * 50)[:-9], "is truncated or damaged", id="cut lzma file"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place_and_the_reason(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=message) as caught:
        data.read_libsvm(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "line", [b"9" * 10**6, b"+1 " + b"x" * 10**6, b"+1 " + b"9" * 4000 + b":1", b"+1 3:" + b"9" * 5000], ids=len
)
def test_a_long_bad_word_is_cut(tmp_path, line):
    path = tmp_path / "file"
    path.write_bytes(line + b"\n")
    with pytest.raises(data.DataError, match=r"characters\)") as caught:
        data.read_libsvm(path)
    assert len(str(caught.value)) < 200 + len(str(path))


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(data.DataError, match="there is no file"):
        data.read_libsvm(tmp_path / "none")
    with pytest.raises(data.DataError, match=r"cannot read .*directory"):
        data.read_libsvm(tmp_path)


def test_a_file_of_one_class_cannot_be_balanced(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"+1 3:1\n")
    with pytest.raises(data.DataError, match="one class only"):
        data.balanced_adult(0, path)
