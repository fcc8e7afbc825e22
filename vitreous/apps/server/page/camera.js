// The dialog that takes a photo with the camera, if there is a camera.

import { part, trouble } from "./page.js";

/** Show the camera button if there is a camera; `taken(file)` is called with each photo. */
export async function camera(taken) {
  const devices = navigator.mediaDevices;
  const available = (await devices?.enumerateDevices?.().catch(() => [])) ?? [];
  if (!available.some((device) => device.kind === "videoinput")) return;
  const dialog = part("shot"), video = part("video");
  let stream = null;
  part("camera").hidden = false;
  part("camera").addEventListener("click", async () => {
    try {
      stream = await devices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1920 } } });
    } catch (error) {
      trouble("Cannot access the camera.", error.name === "NotAllowedError" ? "Allow camera access for this page in the browser settings." : "Close other programs that may be using it.");
      return;
    }
    video.srcObject = stream;
    dialog.showModal();
  });
  dialog.addEventListener("close", () => {
    stream?.getTracks().forEach((track) => track.stop());
    video.srcObject = stream = null;
  });
  part("close-shot").addEventListener("click", () => dialog.close());
  part("take").addEventListener("click", () => {
    if (!video.videoWidth) return; // no frame yet
    const canvas = Object.assign(document.createElement("canvas"), { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    dialog.close();
    canvas.toBlob((blob) => taken(new File([blob], "camera.jpg", { type: "image/jpeg" })), "image/jpeg", 0.95);
  });
}
