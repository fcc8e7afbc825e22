"""The page of a segmentation model, in a browser."""

import pytest
from PIL import Image

import vitreous
from tests.apps.server.test_page import QUIET_SETTINGS, PageVisit, browser, expect  # noqa: F401
from tests.browser import needs_chromium
from tests.reports.test_scenes import scenes_run  # noqa: F401
from vitreous.apps.server.server import serve_in_thread
from vitreous.reports.pages.formats import format_share

pytestmark = needs_chromium


@pytest.mark.parametrize(("size", "theme"), [("desk", "light"), ("phone", "dark")])
def test_class_overlays_are_shown_and_toggled(scenes_run, browser, tmp_path, size, theme):  # noqa: F811
    predictor = vitreous.load(scenes_run)
    image = sorted((scenes_run.parent / "data" / "train" / "images").iterdir())[0]
    Image.open(image).resize((96, 72), Image.Resampling.NEAREST).save(tmp_path / "scene.png")
    segmentation = predictor.segment(tmp_path / "scene.png")
    with serve_in_thread(predictor, QUIET_SETTINGS) as server:
        visit = PageVisit(browser, server.address, size, theme)
        visit.see("#model", "Semantic segmentation, 3 classes")
        visit.page.set_input_files("#file", tmp_path / "scene.png")
        rows = visit.find("#class-list li")
        expect(rows).to_have_count(len(segmentation.class_shares))
        for number, (name, share) in enumerate(segmentation.class_shares.items()):
            expect(rows.nth(number)).to_contain_text(name)
            expect(rows.nth(number)).to_contain_text(format_share(share).replace(" ", "\u00a0"))
        expect(visit.find("#busy")).to_be_hidden()
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        visit.page.wait_for_timeout(300)
        visit.page.evaluate(frames)
        covered = visit.drawn()
        rows.nth(0).locator("input").uncheck()
        visit.page.evaluate(frames)
        plain_drawing = visit.drawn()
        assert plain_drawing != covered
        rows.nth(0).locator("input").check()
        visit.page.evaluate(frames)
        assert visit.drawn() == covered
        visit.find("#cover").fill("0")
        visit.page.evaluate(frames)
        assert visit.drawn() != covered
        frame = visit.find("#picture").bounding_box()
        visit.page.mouse.move(frame["x"] + frame["width"] / 2 + 1, frame["y"] + frame["height"] / 2 + 1)
        visit.see("#readout", segmentation.names[segmentation.classes[36, 48]])
        visit.leave()
