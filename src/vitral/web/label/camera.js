// The camera: a live view, of which a person takes photos. Browsers have it on secure origins only; localhost is one.

import { button, byId, dialog, element, video } from "./dom.js";

export class Camera {
  /**
   * `taken` gets each photo, `failed` the reason why there is none.
   * @param {{ taken: (photo: Blob) => void, failed: (why: string) => void }} calls
   */
  constructor({ taken, failed }) {
    this.taken = taken;
    this.failed = failed;
    /** @type {MediaStream | null} */
    this.stream = null;
    byId("trial-camera").hidden = !navigator.mediaDevices?.getUserMedia;
    button("trial-camera").addEventListener("click", () => this.open());
    button("trial-take").addEventListener("click", () => this.photograph());
    button("trial-off").addEventListener("click", () => this.close());
    video("trial-view").addEventListener("playing", () => {
      button("trial-take").disabled = false;
      button("trial-take").focus();
    });
  }

  async open() {
    this.close();
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: 1280 } });
    } catch (error) {
      this.failed(`The camera cannot be used: ${error instanceof Error ? error.message : error}. Allow it for this page, or choose a file.`);
      return;
    }
    if (!dialog("trial").open) this.close(); // while the browser asked for permission
    video("trial-view").srcObject = this.stream;
    byId("trial-live").hidden = !this.stream;
  }

  /** Turn it off; the light beside a camera goes out. */
  close() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.stream = video("trial-view").srcObject = null;
    button("trial-take").disabled = true;
    byId("trial-live").hidden = true;
  }

  photograph() {
    const view = video("trial-view");
    const canvas = element("canvas");
    canvas.width = view.videoWidth;
    canvas.height = view.videoHeight;
    canvas.getContext("2d")?.drawImage(view, 0, 0);
    canvas.toBlob((photo) => photo && this.taken(photo), "image/png");
  }
}
