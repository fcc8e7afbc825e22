"""The page of a model with a text encoder, in a browser: scores change with the labels."""

import pytest

import vitreous
from tests.apps.server.test_page import QUIET_SETTINGS, PageVisit, browser, expect  # noqa: F401
from tests.browser import needs_chromium
from tests.inference.server_client import encode_noise_image
from tests.weights.pairs import save_pair
from vitreous.apps.server.server import serve_in_thread

pytestmark = needs_chromium


@pytest.mark.parametrize(("size", "theme"), [("desk", "light"), ("phone", "dark")])
def test_scores_change_with_the_labels(browser, tmp_path, size, theme):  # noqa: F811
    (tmp_path / "noise.png").write_bytes(encode_noise_image(3, (96, 72)))
    with serve_in_thread(vitreous.load(save_pair(tmp_path), headless=True), QUIET_SETTINGS) as server:
        visit = PageVisit(browser, server.address, size, theme)
        visit.see("#model", "Zero-shot classification, any labels")
        visit.page.set_input_files("#file", tmp_path / "noise.png")
        rows = visit.find("#answers li .name")
        expect(rows).to_have_count(3)
        visit.find("#labels").fill("bird, wire\ncat, bird")
        expect(rows).to_have_count(3)
        visit.see("#answers", "wire")
        visit.see("#history", "%")
        visit.find("#templates").select_option("none")
        visit.find("input[value=sigmoid]").check()
        visit.see("#note", "Multi-label")
        expect(visit.find("#busy")).to_be_hidden()
        visit.page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        visit.find("input[value=softmax]").check()
        visit.find("#labels").fill("cat")
        visit.see("#labels-problem", "at least two labels")
        visit.leave()
