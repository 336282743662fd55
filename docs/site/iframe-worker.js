// Browsers start no workers from files. Pages that are opened from a disk run the search in a hidden frame instead.
"use strict"
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><script>window.importScripts = async (...urls) => { for (const url of urls) " +
        "await new Promise((done, failed) => { const script = document.createElement('script'); script.src = url; " +
        "script.onload = done; script.onerror = failed; document.body.append(script) }) }; " +
        "window.postMessage = data => parent.dispatchEvent(new MessageEvent('from-worker', {data}))<\/script><body>"
      window.addEventListener("from-worker", event => {
        const message = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      this.frame.onload = () => {
        const script = this.frame.contentDocument.createElement("script")
        script.src = url
        script.onload = () => { this.ready = true; this.waiting.splice(0).forEach(data => this.postMessage(data)) }
        this.frame.contentDocument.body.append(script)
      }
      document.body.append(this.frame)
    }
    postMessage(data) {
      if (!this.ready) return void this.waiting.push(data)
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() { this.frame.remove() }
  }
}
