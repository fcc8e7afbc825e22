"""The page of an object detector, in a browser."""

import pytest

from tests.apps.server.test_page import QUIET_SETTINGS, PageVisit, browser, expect  # noqa: F401
from tests.browser import needs_chromium
from tests.inference.blobs import CLASSES, make_blob_predictor, make_scene
from vitreous.apps.server.server import serve_in_thread

pytestmark = needs_chromium
NEXT_FRAMES_JS = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def read_drawn_pixels(visit) -> str:
    visit.page.evaluate(NEXT_FRAMES_JS)
    return visit.drawn()


@pytest.mark.parametrize(("size", "theme"), [("desk", "light"), ("phone", "dark")])
def test_objects_are_listed_drawn_toggled_and_highlighted(browser, tmp_path, size, theme):  # noqa: F811
    make_scene((96, 64), (8, 8, 40, 40), (50, 20, 80, 50)).save(tmp_path / "scene.png")
    left, top, right, bottom = make_blob_predictor().detect(tmp_path / "scene.png").boxes[1].tolist()
    with serve_in_thread(make_blob_predictor(), QUIET_SETTINGS) as server:
        visit = PageVisit(browser, server.address, size, theme)
        visit.see("#model", "Object detection, 2 classes")
        visit.page.set_input_files("#file", tmp_path / "scene.png")
        rows, class_rows = visit.find("#object-list button"), visit.find("#kinds li")
        expect(rows).to_have_count(2)
        expect(visit.find("#busy")).to_be_hidden()
        assert [text.split("\xa0")[0] for text in rows.all_text_contents()] == [CLASSES[0] + "90", "green60"]
        visit.see("#count", "2 objects")
        visit.see("#said", f"scene.png: 1 {CLASSES[0]}, 1 green.")
        assert visit.find("#objects b").count() == 0  # names are escaped
        visit.page.wait_for_timeout(300)
        drawn_pixels = read_drawn_pixels(visit)
        class_rows.nth(1).locator("input").uncheck()
        expect(rows).to_have_count(1)
        visit.see("#count", "1 object, 1 hidden")
        assert read_drawn_pixels(visit) != drawn_pixels
        class_rows.nth(1).locator("input").check()
        assert read_drawn_pixels(visit) == drawn_pixels
        visit.find("#least-score").fill("70")
        expect(rows).to_have_count(1)
        visit.see("#kinds li:nth-child(2) .share", "0")
        visit.find("#least-score").fill("50")
        visit.find("#fill").fill("0")
        assert read_drawn_pixels(visit) != drawn_pixels
        visit.find("#fill").fill("45")
        assert read_drawn_pixels(visit) == drawn_pixels
        rows.nth(1).focus()
        visit.see("#readout", f"green 60\xa0%, {int(right - left + 0.5)} × {int(bottom - top + 0.5)} pixels")
        assert read_drawn_pixels(visit) != drawn_pixels
        visit.page.keyboard.press("Enter")
        expect(rows.nth(1)).to_have_attribute("aria-pressed", "true")
        visit.page.keyboard.press("Shift+Tab")
        visit.see("#readout", CLASSES[0])
        visit.page.keyboard.press("Tab")
        visit.page.keyboard.press("Enter")
        visit.page.evaluate("document.activeElement.blur()")
        visit.see("#readout", "scene.png")
        frame = visit.find("#picture").bounding_box()
        share = min(frame["width"] / 96, frame["height"] / 64)
        object_centre = (frame["width"] - 96 * share) / 2 + 65 * share, (frame["height"] - 64 * share) / 2 + 35 * share
        visit.page.mouse.move(frame["x"] + object_centre[0], frame["y"] + object_centre[1])
        visit.see("#readout", "green 60")
        visit.page.mouse.move(1, 1)
        assert read_drawn_pixels(visit) == drawn_pixels
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= visit.page.viewport_size["width"]
        visit.leave()


def test_an_image_without_objects_is_reported(browser, tmp_path):  # noqa: F811
    make_scene((64, 64), None, None).save(tmp_path / "empty.png")
    with serve_in_thread(make_blob_predictor(masks=False), QUIET_SETTINGS) as server:
        visit = PageVisit(browser, server.address)
        visit.page.set_input_files("#file", tmp_path / "empty.png")
        visit.see("#count", "No objects detected")
        expect(visit.find("#fill-row")).to_be_hidden()
        visit.see("#history", "no objects")
        visit.leave()
