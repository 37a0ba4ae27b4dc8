// The camera: a dialog that takes photos of a class, and a view that is answered while it moves.

import { at, counted, problem, showProblem } from "./elements.js";

/** Open the camera in a video element; returns a function that closes it, or null if it cannot be used.
 * @param {HTMLVideoElement} view */
async function openedIn(view) {
  try {
    view.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: 1280 } });
  } catch (error) {
    showProblem(problem("The camera cannot be used", String(error), "allow it for this page, or choose files"));
    return null;
  }
  return () => {
    for (const track of /** @type {MediaStream} */ (view.srcObject)?.getTracks() ?? []) track.stop();
    view.srcObject = null;
  };
}

/** The dialog that takes photos. `take(image)` is called with each as an ImageBitmap. */
export class Camera {
  constructor() {
    /** @type {(() => void) | null} */
    this.close = null;
    /** @type {(image: ImageBitmap) => Promise<void>} */
    this.take = async () => {};
    this.count = 0;
    const view = at("camera-view");
    view.addEventListener("playing", () => {
      at("camera-take").disabled = false;
    });
    at("camera-done").addEventListener("click", () => at("camera-dialog").close());
    at("camera-dialog").addEventListener("close", () => {
      this.close?.();
      at("camera-take").disabled = true;
    });
    at("camera-take").addEventListener("click", async () => {
      await this.take(await createImageBitmap(view));
      this.count += 1;
      at("camera-note").textContent = `${counted(this.count, "photo")} taken. Move a little between photos.`;
    });
  }

  /** @param {string} title @param {(image: ImageBitmap) => Promise<void>} take */
  async open(title, take) {
    this.take = take;
    this.count = 0;
    at("camera-title").textContent = `Photos of ${title}`;
    at("camera-note").textContent = "";
    this.close = await openedIn(at("camera-view"));
    if (this.close) at("camera-dialog").showModal();
  }
}

/** Answer the view of the camera, one image after the other, until it is closed. */
export class LiveView {
  /** @param {(image: ImageBitmap) => Promise<boolean>} answer */
  constructor(answer) {
    /** @type {(() => void) | null} */
    this.close = null;
    const button = at("try-camera");
    button.hidden = !navigator.mediaDevices?.getUserMedia;
    button.addEventListener("click", () => (this.close ? this.end() : this.begin(answer)));
  }

  /** @param {(image: ImageBitmap) => Promise<boolean>} answer */
  async begin(answer) {
    const view = at("try-view");
    const close = await openedIn(view);
    if (!close) return;
    this.close = close;
    this.show(true);
    await new Promise((resolve) => view.addEventListener("playing", resolve, { once: true }));
    let seen = true;
    while (seen && this.close === close) seen = await answer(await createImageBitmap(view));
    if (this.close === close) this.end();
  }

  end() {
    this.close?.();
    this.close = null;
    this.show(false);
  }

  /** @param {boolean} on */
  show(on) {
    at("try-view").hidden = !on;
    at("try-camera").setAttribute("aria-pressed", String(on));
    at("try-label").setAttribute("aria-live", on ? "off" : "polite"); // it changes with every image of the camera
    at("try-camera").textContent = on ? "Stop the camera" : "Use the camera";
  }
}
